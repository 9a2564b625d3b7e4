"""The form of a job, as the JSON schema of a request has it: what is added to the schema is on the form."""
