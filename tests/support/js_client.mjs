/** The JavaScript client as a program: follows a room and its answers, and prints what it is told, as JSON lines. */

import { GatewayClient } from "../../clients/js/src/index.js";

const [url, conversation] = process.argv.slice(2);
const say = (kind, value) => console.log(JSON.stringify({ kind, value }));
const client = new GatewayClient(url, { backoffFirstMs: 200 });
client.onState(({ state }) => say("state", state));
const room = client.join(conversation, {
  resume: 0,
  onMessage: async ({ sequence }) => {
    await new Promise((resolve) => setTimeout(resolve)); // not done at once: the ack must wait
    say("message", sequence);
  },
  onGap: (gap) => say("gap", gap),
  onEvent: ({ event }) => say("event", event.state ?? event.status),
  onState: ({ state }) => say("joined", [state, room.position]),
  onError: (error) => say("error", error.message),
});
const tokens = client.tokens(conversation, {
  backoffFirstMs: 200,
  onToken: ({ token, text }) => say("token", { token, text }),
});
room.presence("online");
client.start();
process.stdin.on("data", () => {
  say("position", room.position);
  tokens.close();
  client.close();
  process.exit(0); // the other side may take its time to close
});
