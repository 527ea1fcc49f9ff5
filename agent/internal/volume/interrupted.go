package volume

import (
	"context"
	"errors"
	"os"
	"strings"
)

// removeInterrupted removes what a creation or a deletion that failed has left of a member's own volumes.
func (v *Volumes) removeInterrupted(ctx context.Context, memberID string) error {
	entries, err := os.ReadDir(v.cfg.Dir)
	if err != nil {
		return failed("read its directory", err)
	}
	var errs []error
	for _, e := range entries {
		id := interrupted(e.Name())
		if id == e.Name() || !strings.HasPrefix(id, memberID+".") {
			continue
		}
		unlock, err := v.lock(ctx, id)
		if err == nil {
			err = os.RemoveAll(v.path(e.Name()))
			unlock()
		}
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

// interrupted is the id of the volume whose creation or deletion was interrupted in the directory of this name; the
// name itself for any other.
func interrupted(name string) (id string) {
	return strings.TrimPrefix(strings.TrimPrefix(name, newPrefix), deletedPrefix)
}
