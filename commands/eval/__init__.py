"""`snapserve eval`: what a cache policy costs in answers, measured from the packed slot."""
