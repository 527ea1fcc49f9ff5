package agent

// Releases reports whether the action gives something back rather than taking it.
func Releases(a Action) bool { return a.order() <= orderRetire }
