"""What follows an attempt: restart, requeue or stop. Deciding is pure; doing is in the verbs."""
