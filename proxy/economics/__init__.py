"""When does a rewrite pay? Facts of providers, what was learned of their caches, and the sum. Pure."""
