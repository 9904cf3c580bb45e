/** Rooms and token streams of an Oncewire gateway, for browsers and Node. */

/** The realtime envelope 2024-12-01, as the gateway sends it. */
export interface Envelope<E = ChatEvent> {
  version: "2024-12-01";
  conversationId: string;
  /** Of a message its number in the conversation: 1, 2, 3 …; of other events the last number that was known. */
  sequence: number;
  issuedAt: string;
  contract: { guarantee: "at-least-once" | "exactly-once-emulated"; dedupeKey: string };
  event: E;
  /** True when the gateway sends it again. */
  replay?: boolean;
}

export interface MessageCreated {
  type: "chat.message.created";
  messageId: string;
  dedupeId: string;
  role: "user" | "assistant" | "system";
  content: string;
  model?: string;
  citations?: unknown;
  metadata?: Record<string, unknown>;
}

export interface StreamLifecycle {
  type: "chat.stream.lifecycle";
  messageId: string;
  status: "started" | "blocked" | "completed" | "errored";
  detail?: unknown;
}

export interface Presence {
  type: "chat.presence";
  userId: string;
  state: PresenceState;
  metadata?: Record<string, unknown>;
}

export type ChatEvent = MessageCreated | StreamLifecycle | Presence;
export type PresenceState = "online" | "offline" | "typing" | "idle";

/** How far a room is done. Keep it, and pass it as `resume` later. */
export interface Position {
  sequence: number;
  epoch: string | null;
}

/** Messages that nobody has any more: the first and the last that is missing. */
export interface Gap {
  from: number;
  to: number;
}

export interface ConnectionState {
  state: "idle" | "connecting" | "open" | "waiting" | "closed";
  /** While waiting: how long until the next attempt. */
  retryMs?: number;
  /** When closed: why. 4401: the credential was refused; 4403: it does not allow this. */
  code?: number;
  /** Why it is closed or waits, where that is known. */
  reason?: string;
}

/** An API key or a token; or a ticket, which your server bought with one (`POST /tickets`) and lives for a minute. */
export type Credential = string | { ticket: string };

export interface RoomState {
  room: string;
  /** `waiting`: refused for now, for a limit or an outage, and tried again after `retryMs`. `refused`: not allowed; it is
   * tried again only with the next connection. */
  state: "joined" | "waiting" | "refused";
  epoch?: string | null;
  retryMs?: number;
  /** The gateway's code and sentence, such as `permission_denied`. */
  code?: string;
  reason?: string;
}

/** Times in milliseconds, and limits. */
export interface Limits {
  /** The delay before the first reconnect, doubled each time, and the half of it by chance. Default 2,000. */
  backoffFirstMs?: number;
  /** The longest delay. Default 30,000. */
  backoffMostMs?: number;
  /** How long opening a connection may take. Default 10,000. */
  connectMs?: number;
  /** How often a heartbeat is sent. Default 15,000. */
  heartbeatMs?: number;
  /** After so long without a word from the gateway the connection counts as dead. Default 35,000. */
  silenceMs?: number;
  /** How long acknowledgements are collected. Default 50. */
  ackMs?: number;
  /** So many messages are acknowledged at once. Default 64. */
  ackCount?: number;
  /** So many messages wait for a slow handler; what comes then is asked for again later. Default 1,000. */
  queueMost?: number;
  /** So many message ids are remembered per room. Default 1,000. */
  seenMost?: number;
  /** Messages per page of history. Default 200. */
  historyLimit?: number;
}

export interface ClientOptions extends Limits {
  /** Where there is no global one (Node before 22). */
  WebSocket?: unknown;
  fetch?: typeof globalThis.fetch;
  /** Asked for a credential before each connect, each token stream and each history request. A WebSocket cannot carry a
   * header: with a key or a token the client buys a ticket for it. When it throws, it is asked again after a delay. */
  credentials?(): Credential | null | Promise<Credential | null>;
  /** Further headers for history and token streams. A browser's WebSocket cannot send any. */
  headers?: Record<string, string>;
}

export interface JoinOptions {
  /** 0: the whole history. A number or a position: what comes after it. "acked": what this client did not
   * acknowledge yet (needs `clientId` or a signed-in user). Left out: what comes from now on. */
  resume?: number | Position | "acked" | null;
  /** Under which the gateway keeps acknowledgements for a client without a sign-in. */
  clientId?: string;
  /** Called for each message, in order, once, one at a time. It is acknowledged when the promise is fulfilled; when it
   * is rejected, the same message comes again after a delay. */
  onMessage?(envelope: Envelope<MessageCreated>): void | Promise<void>;
  /** Called in place of messages that are gone for good. */
  onGap?(gap: Gap): void | Promise<void>;
  /** Presence, and answers that begin or end. */
  onEvent?(envelope: Envelope<StreamLifecycle | Presence>): void;
  /** Whether the gateway has this client in the room. */
  onState?(state: RoomState): void;
  /** What went wrong; it is tried again without further doing. */
  onError?(error: Error): void;
}

/** One connection to a gateway, kept up until `close`. */
export class GatewayClient {
  constructor(url: string | URL, options?: ClientOptions);
  readonly state: ConnectionState["state"];
  start(): this;
  close(): void;
  onState(listener: (state: ConnectionState) => void): () => void;
  join(conversationId: string, options?: JoinOptions): Room;
  tokens(conversationId: string, options?: TokenOptions): TokenStream;
  httpUrl(path: string): URL;
}

/** One followed room. */
export class Room {
  readonly client: GatewayClient;
  readonly conversationId: string;
  readonly position: Position | null;
  presence(state: PresenceState, metadata?: Record<string, unknown>): void;
  /** Follow it no longer. The gateway no longer counts it among this client's rooms. */
  leave(): void;
}

export interface Token {
  type: "token";
  messageId: string;
  token: string;
  /** All tokens of the answer so far. */
  text: string;
  isFinal: boolean;
  /** What goes with the piece and is not part of the text, such as reasoning or a call of a tool. */
  metadata: Record<string, unknown> | null;
  /** No piece before this one is missing: the stream keeps only so many. */
  isWhole: boolean;
}

export interface Lifecycle {
  type: StreamLifecycle["status"];
  messageId: string;
  /** All tokens of the answer so far. */
  text: string;
  detail?: unknown;
  isWhole: boolean;
}

export interface TokenOptions extends Limits {
  /** Where to go on; left out, it begins with the running answer. */
  lastEventId?: string;
  onToken?(token: Token): void;
  onLifecycle?(lifecycle: Lifecycle): void;
  onState?(state: ConnectionState): void;
  onError?(error: Error): void;
}

/** The answers that are being written in a conversation. */
export class TokenStream {
  private constructor();
  readonly lastEventId: string;
  /** Stop listening. The answer goes on being written. */
  close(): void;
  /** Ask that the running answer ends. */
  stop(messageId?: string): Promise<void>;
}
