"""What broke, whose fault it was, what it cost: from accounting and the runs' own records."""
