/** Rooms and token streams of an Oncewire gateway, for browsers and Node. No dependencies. */

export { GatewayClient, Room } from "./client.js";
export { TokenStream } from "./tokens.js";
