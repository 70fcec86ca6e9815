"""The load test: many sessions at once through a real proxy, every byte checked. `make load` runs it."""
