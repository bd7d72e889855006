"""What runs inside a workspace. Sent there as text; nothing on the host imports it."""
