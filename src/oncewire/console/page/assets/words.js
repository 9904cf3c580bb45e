// The words for states that several views show.

export const PROMISES = {
  power: { tone: "good", name: "survives a power cut" },
  crash: { tone: "warn", name: "survives a crash only" },
  unknown: { tone: "warn", name: "not known" },
};

export const KINDS = { stream: "stream", queue: "work queue", bucket: "bucket", topic: "topic" };

const IDLE_MS = 6_000;
const since = new Map();

/** Whether nobody has worked for a while: who polls is away for a moment between two polls. */
export function isIdle(key, isNow) {
  if (!isNow) since.delete(key);
  else if (!since.has(key)) since.set(key, Date.now());
  return isNow && Date.now() - since.get(key) > IDLE_MS;
}
