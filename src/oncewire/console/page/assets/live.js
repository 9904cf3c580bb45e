// The one stream from the server. When it breaks, it is tried again after a while that grows, and the page says so.

const SECTIONS = ["overview", "latency", "streams", "topics", "letters", "pipeline", "jobs"];
const POINTS_MAX = 180;
const FIRST_WAIT_MS = 500;
const LONGEST_WAIT_MS = 15_000;
const SILENCE_MS = 8_000;

/** `changed` is called after everything that comes, `broke` when the stream has ended. */
export class Live {
  constructor(changed, broke) {
    this.changed = changed;
    this.broke = broke;
    this.state = "connecting";
    this.points = [];
    this.sections = {};
    this.versions = {};
    this.tick = null;
    this.skew = 0;
    this.retryAt = 0;
    this.heardAt = 0;
    this.waits = 0;
    this.ended = "";
    setInterval(() => this.look(), 1_000);
  }

  /** The server's time. */
  get now() {
    return Date.now() + this.skew;
  }

  open() {
    this.state = "connecting";
    this.heardAt = Date.now();
    this.source = new EventSource("/api/live");
    this.source.onerror = () => this.lost();
    const on = (name, take) =>
      this.source.addEventListener(name, (event) => {
        this.heard();
        take(JSON.parse(event.data));
        this.changed();
      });
    on("tick", (value) => {
      this.tick = value;
      this.skew = value.now_ms - Date.now();
    });
    on("history", (value) => {
      this.points = value;
    });
    on("point", (value) => {
      this.points = [...this.points, value].slice(-POINTS_MAX);
    });
    on("farewell", (value) => {
      this.ended = value.text;
      this.lost();
    });
    for (const name of SECTIONS) {
      on(name, (value) => {
        this.sections[name] = value;
        this.versions[name] = (this.versions[name] ?? 0) + 1;
      });
    }
  }

  heard() {
    this.heardAt = Date.now();
    this.waits = 0;
    this.state = "live";
    this.ended = "";
  }

  lost() {
    this.source?.close();
    const wait = Math.min(LONGEST_WAIT_MS, FIRST_WAIT_MS * 2 ** this.waits);
    this.waits += 1;
    this.state = "waiting";
    this.retryAt = Date.now() + wait;
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.open(), wait);
    this.broke();
    this.changed();
  }

  /** Now, because somebody asked for it. */
  again() {
    clearTimeout(this.timer);
    this.source?.close();
    this.open();
    this.changed();
  }

  close() {
    clearTimeout(this.timer);
    this.source?.close();
    this.state = "closed";
  }

  /** A page that nobody sees gives its connection up: a browser has six for all pages of a server. */
  seen(isVisible) {
    if (!isVisible && this.state !== "closed") this.close();
    else if (isVisible && this.state === "closed") this.again();
  }

  look() {
    if (this.state === "live" && Date.now() - this.heardAt > SILENCE_MS) this.lost();
    else this.changed();
  }
}
