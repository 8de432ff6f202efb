from hypothesis import settings

# Tests may not time: on a busy machine an example takes as long as it takes.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")
