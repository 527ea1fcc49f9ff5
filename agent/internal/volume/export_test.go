package volume

// MakeContent makes the directory for containers in a file system.
func MakeContent(at string) (content string, err error) { return makeContent(at) }
