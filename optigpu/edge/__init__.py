"""What is known of edge devices besides SQL and HTTP: invitation codes, signatures, and which reports can be true."""
