import assert from "node:assert/strict";
import { test } from "node:test";
import { Answers, EventParser } from "../src/sse.js";

const TEXT = ": hi\r\nid: 1-1\nevent: token\ndata: {\"a\":\ndata: 1}\n\nid: 1-2\rdata:x\r\rdata\n\n: only a comment\n\n";
const EVENTS = [
  { id: "1-1", event: "token", data: '{"a":\n1}' },
  { id: "1-2", event: "message", data: "x" },
  { id: "1-2", event: "message", data: "" },
];

test("events are the same wherever the text is cut", () => {
  assert.deepEqual(new EventParser().feed(TEXT), EVENTS);
  for (let cut = 0; cut <= TEXT.length; cut += 1) {
    const parser = new EventParser();
    assert.deepEqual([...parser.feed(TEXT.slice(0, cut)), ...parser.feed(TEXT.slice(cut))], EVENTS, `cut at ${cut}`);
  }
  const parser = new EventParser();
  assert.deepEqual([...TEXT].flatMap((character) => parser.feed(character)), EVENTS);
});

test("half an event of a broken connection leaves no trace", () => {
  const parser = new EventParser();
  parser.feed("id: 1-1\ndata: a\n\nid: 1-2\ndata: b\n");
  const next = parser.fresh();
  assert.equal(next.lastEventId, "1-1");
  assert.deepEqual(next.feed("data: c\n\n"), [{ id: "1-1", event: "message", data: "c" }]);
});

const chunk = (chunkId, token, isFinal) => ({ event: { type: "chat.token.chunk", messageId: "m", chunkId, token, isFinal } });
const lifecycle = (status) => ({ event: { type: "chat.stream.lifecycle", messageId: "m", status } });

test("chunks are put together once each, until the final one", () => {
  const answers = new Answers();
  assert.equal(answers.take(lifecycle("started")).type, "started");
  assert.equal(answers.take(chunk("1", "Hello")).text, "Hello");
  assert.equal(answers.take(chunk("1", "Hello")), null);
  const last = answers.take(chunk("2", ", world", true));
  assert.deepEqual([last.text, last.isFinal], ["Hello, world", true]);
  assert.equal(answers.take(chunk("3", "late")), null);
  assert.equal(answers.take(lifecycle("completed")).text, "Hello, world");
});

test("an answer that broke off keeps what there was", () => {
  const answers = new Answers();
  answers.take(chunk("1", "Hel"));
  const expected = { type: "errored", messageId: "m", text: "Hel", detail: undefined, isWhole: true };
  assert.deepEqual(answers.take(lifecycle("errored")), expected);
});

test("an answer that is begun anew forgets what there was", () => {
  const answers = new Answers();
  answers.take(chunk("1", "Hel"));
  answers.take(lifecycle("errored"));
  assert.equal(answers.take(lifecycle("started")).text, "");
  assert.equal(answers.take(chunk("2", "Hallo")).text, "Hallo");
});

test("metadata of a chunk reaches the application", () => {
  const envelope = chunk("1", "");
  envelope.event.metadata = { reasoning: "hm" };
  const { text, metadata } = new Answers().take(envelope);
  assert.deepEqual([text, metadata], ["", { reasoning: "hm" }]);
});

test("an answer of which a chunk is missing says so, and one that is begun anew is whole again", () => {
  const answers = new Answers();
  answers.take(lifecycle("started"));
  const taken = ["0123abcd-1", "0123abcd-2", "0123abcd-4"].map((id) => answers.take(chunk(id, "x")).isWhole);
  assert.deepEqual(taken, [true, true, false]);
  assert.equal(answers.take(lifecycle("completed")).isWhole, false);
  answers.take(lifecycle("started"));
  const again = ["aaaaaaaa-1", "bbbbbbbb-1", "nobody's", "cccccccc-2"].map((id) => answers.take(chunk(id, "x")).isWhole);
  assert.deepEqual(again, [true, true, true, false]);
});
