"""The broker's own log: segmented files, group commit, snapshots. It knows bytes, not what they mean."""
