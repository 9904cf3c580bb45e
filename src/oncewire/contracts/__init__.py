"""What the messages are: envelopes, subjects, ids, trace context and their JSON Schemas.

Everything here is pure: values in, values out. No clock, no I/O, no chance; time and entropy are arguments.
"""
