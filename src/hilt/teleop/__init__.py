"""The person in the loop: devices, and the wrapper that decides who acts."""
