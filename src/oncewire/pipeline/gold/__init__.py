"""Gold: what people ask of the lake. Delivery health, lineage, usage, each computed anew from silver."""
