"""Says what this machine offers to training, what it lacks, and what helps."""
