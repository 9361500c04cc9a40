"""Windows whose transfers are checked while RMA_MM_CHECK is 1, and the content that shows what was not filled."""
