"""The form of a job, as the JSON schema of a request has it: what is added to the schema is on the form.

schema.py      the schema -> fields, groups of fields, and choices between members
documents.py   what a form sends -> the JSON of a request, and back; the API's errors -> fields of the form
"""
