"""The realtime gateway: WebSocket rooms with exact resume, tokens over SSE, presence, acks, history."""
