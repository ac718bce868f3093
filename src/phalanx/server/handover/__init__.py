"""What a prefill server and a decode server do to answer one request together."""
