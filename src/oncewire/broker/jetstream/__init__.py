"""The broker over JetStream: any number of nodes, each the owner of some partitions at a time, under the same rules."""
