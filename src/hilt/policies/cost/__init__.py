"""How long a policy's own code will take: its operations are counted, and a calibration of the machine times each."""
