"""The names of the files that a run leaves in its ``output_dir`` for its report."""

REPORT_NAME = "adaptive_batch.json"
JOURNAL_NAME = "adaptive_steps.jsonl"
