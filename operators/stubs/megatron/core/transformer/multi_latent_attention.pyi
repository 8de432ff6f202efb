HAVE_TE: bool
