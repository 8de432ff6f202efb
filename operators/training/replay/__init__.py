"""Routing replay: recorders and replayers for the routers, counts of replayed rows, and checks."""
