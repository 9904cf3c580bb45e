"""What the parts are built on. Internal: what users need of it is exported by `oncewire` and by the parts.

Nothing here imports a part. Within it imports go downwards; `.importlinter` has the order.
"""
