// What is asked for besides the live stream. Answers are kept until their version changes; while a new one is on its way
// the old one stays.

export class Failure extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

export async function get(path) {
  return answer(await reach(fetch(path, { headers: { Accept: "application/json" } })));
}

export async function post(path, body) {
  const headers = { "Content-Type": "application/json" };
  return answer(await reach(fetch(path, { method: "POST", headers, body: JSON.stringify(body) })));
}

async function reach(asked) {
  try {
    return await asked;
  } catch {
    throw new Failure(0, "The console's server cannot be reached.");
  }
}

async function answer(response) {
  const told = await response.json().catch(() => ({}));
  if (!response.ok) throw new Failure(response.status, told.message ?? `The server answered ${response.status}.`);
  return told;
}

export class Resources {
  constructor(changed, denied) {
    this.changed = changed;
    this.denied = denied;
    this.known = new Map();
  }

  /** {data, error, isLoading} of an address, asked for again when `version` is another one. */
  use(path, version = 0) {
    let entry = this.known.get(path);
    if (entry === undefined) {
      if (this.known.size > 50) this.known.clear();
      entry = { data: null, error: null, isLoading: false, version: undefined };
      this.known.set(path, entry);
    }
    if (!entry.isLoading && entry.version !== version) this.#load(path, entry, version);
    return entry;
  }

  async #load(path, entry, version) {
    entry.isLoading = true;
    entry.version = version;
    try {
      entry.data = await get(path);
      entry.error = null;
    } catch (error) {
      entry.error = error;
      if (error.status === 401) this.denied();
    }
    entry.isLoading = false;
    this.changed();
  }
}
