package volume

import "context"

// MakeContent makes the directory for containers in a file system.
func MakeContent(at string) (content string, err error) { return makeContent(at) }

// Lock keeps every action on the volume waiting until unlock is called.
func (v *Volumes) Lock(ctx context.Context, id string) (unlock func(), err error) {
	return v.lock(ctx, id)
}
