"""Compaction tests: what the context loses, keeps and can have back when the proxy leaves blocks out.

The families follow the sections on evaluating and testing compression of the book chapter (10.19, 10.20). Each is a
module with a table of cases; all of them drive the session logic that serves, on a clock that is moved by hand.
`cases` says what a case and its outcome are, `checks` what the product promises of every request.
"""
