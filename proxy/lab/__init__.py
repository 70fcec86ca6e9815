"""The evaluation lab: the paper's studies and the compaction tests, on data and models of the user.

Nothing here is used while the proxy serves. Studies are pure functions of recordings; what they print comes from rows
in JSONL files (`results`), so that a run can be stopped, resumed and drawn again.
"""
