"""Ways of proposing tokens: trained drafters and methods that need no training, one file each."""
