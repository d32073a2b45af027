"""The pages: a server's and a silo's, and the parts that they have."""
