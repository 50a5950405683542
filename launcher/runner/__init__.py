"""What runs in every rank: environment check, injection, recorder, the unmodified script.

Standard library only, with torch only if the training script brought it; imports nothing
else of the launcher, because this folder alone is copied into the payload of a job.
"""
