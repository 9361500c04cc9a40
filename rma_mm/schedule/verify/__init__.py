"""Is a schedule right? Checked whole by one process, or proved together by ranks that see their own part each."""
