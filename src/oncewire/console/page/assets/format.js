// Numbers, sizes and times for people. The same everywhere, so that columns can be compared.

const WHOLE = new Intl.NumberFormat("en");

export const count = (value) => (value === null ? "–" : WHOLE.format(value));

/** Of rows, null when one of them is not known. */
export const sum = (rows, of) => (rows.some((row) => of(row) === null) ? null : rows.reduce((all, row) => all + of(row), 0));

/** 1,234 stays, 1,234,567 becomes 1.23 M: for tiles. */
export function short(value) {
  if (value < 10_000) return value % 1 ? value.toFixed(value < 10 ? 1 : 0) : WHOLE.format(value);
  for (const [unit, size] of [["G", 1e9], ["M", 1e6], ["k", 1e3]]) {
    if (value >= size) return `${(value / size).toPrecision(3)} ${unit}`;
  }
  return String(value);
}

export function bytes(value) {
  if (value === null) return "–";
  let left = value;
  for (const unit of ["B", "KiB", "MiB", "GiB"]) {
    if (left < 1024) return `${unit === "B" || left >= 10 ? left.toFixed(0) : left.toFixed(1)} ${unit}`;
    left /= 1024;
  }
  return `${left.toFixed(1)} TiB`;
}

/** A rate per second; nothing moving is a quiet sign. */
export const perSecond = (value) => (value ? `${short(value)}/s` : "–");

export function duration(ms) {
  if (ms < 1) return `${(ms * 1000).toFixed(0)} µs`;
  if (ms < 1_000) return `${ms < 10 ? ms.toFixed(1) : ms.toFixed(0)} ms`;
  if (ms < 60_000) return `${(ms / 1000).toFixed(ms < 10_000 ? 2 : 1)} s`;
  if (ms < 3_600_000) return `${Math.floor(ms / 60_000)} min ${Math.round((ms % 60_000) / 1000)} s`;
  return `${Math.floor(ms / 3_600_000)} h ${Math.round((ms % 3_600_000) / 60_000)} min`;
}

export function ago(ms, now) {
  const passed = Math.max(0, now - ms);
  if (passed < 1_500) return "just now";
  for (const [unit, size] of [["d", 86_400_000], ["h", 3_600_000], ["min", 60_000]]) {
    if (passed >= size) return `${Math.floor(passed / size)} ${unit} ago`;
  }
  return `${Math.floor(passed / 1000)} s ago`;
}

/** Local time of day, with the date when it was not today. */
export function when(ms) {
  const at = new Date(ms);
  const time = at.toLocaleTimeString("en-GB");
  return at.toDateString() === new Date().toDateString() ? time : `${at.toLocaleDateString("en-CA")} ${time}`;
}

export const plural = (amount, noun, many = `${noun}s`) => `${count(amount)} ${amount === 1 ? noun : many}`;
