// The words for states that several views show.

export const PROMISES = {
  power: { tone: "good", name: "survives a power cut" },
  crash: { tone: "warn", name: "survives a crash only" },
  unknown: { tone: "warn", name: "not known" },
};

export const KINDS = { stream: "stream", queue: "work queue", bucket: "bucket", topic: "topic" };
