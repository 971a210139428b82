"""`snapserve eval prose`: facts in real prose, with questions at other places than the end of a prompt."""
