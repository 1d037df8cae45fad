"""What a decode worker does with requests: admission, siblings, replies, claims."""
