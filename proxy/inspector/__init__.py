"""The page at /recap/ and the routes it reads: what the archive knows of each session, as JSON.

`routes` is the only part that knows HTTP; the others turn a `Reader` into plain values. `static/` is the page.
"""
