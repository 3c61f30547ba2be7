"""What a policy's answers are worth: scores, votes, named data sets, and how results are kept."""
