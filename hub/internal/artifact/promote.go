package artifact

import (
	"context"
	"slices"
	"time"

	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/pkg/fault"
)

// channels are the environments that an artifact is promoted through, in this order.
func channels() []string { return []string{"dev", "stage", "prod"} }

// later returns the later of two channels.
func later(a, b string) string {
	if slices.Index(channels(), a) < slices.Index(channels(), b) {
		return b
	}
	return a
}

// Judged stores what reading an artifact's signatures once more found. A verified artifact stays verified, as in
// Register. changed is false where it found nothing new.
func Judged(ctx context.Context, tx db.Tx, before Artifact, trust TrustState, evidence []Evidence,
	now time.Time,
) (after Artifact, changed bool, err error) {
	if err := before.checkKept(); err != nil {
		return Artifact{}, false, err
	}
	same := slices.EqualFunc(before.Evidence, evidence, func(a, b Evidence) bool {
		return a.Kind == b.Kind && a.KeyID == b.KeyID && a.Digest == b.Digest
	})
	if before.TrustState == Verified && trust != Verified || before.TrustState == trust && same {
		return before, false, nil
	}
	after = before
	after.TrustState, after.Evidence = trust, append([]Evidence{}, evidence...)
	after.UpdatedAt, after.ResourceVersion = now, before.ResourceVersion+1
	return after, true, updateArtifact(ctx, tx, after)
}

// Promote moves a verified artifact to a later channel. Promoting it to its channel changes nothing.
func Promote(ctx context.Context, tx db.Tx, before Artifact, channel string,
	now time.Time,
) (after Artifact, changed bool, err error) {
	refused := func(why, field string) error {
		return fault.New(fault.Conflict, codeNotPromotable, "The artifact cannot be promoted: "+why+".", nil).
			WithField("/channel", field).Permanent()
	}
	if err := before.checkKept(); err != nil {
		return Artifact{}, false, err
	}
	switch {
	case !slices.Contains(channels(), channel):
		return Artifact{}, false, refused("there is no such channel", "is no channel")
	case before.Status == Deprecated:
		return Artifact{}, false, refused("it is deprecated", "takes no deprecated artifact")
	case before.TrustState != Verified:
		return Artifact{}, false, fault.New(fault.Conflict, CodeNotVerified, "Only a verified artifact can be promoted; "+
			"sign it and verify it first.", nil).Permanent()
	case before.Channel == channel:
		return before, false, nil
	case later(before.Channel, channel) == before.Channel:
		return Artifact{}, false, refused("it is in channel "+before.Channel, "is before that of the artifact")
	}
	after = before
	after.Channel, after.UpdatedAt, after.ResourceVersion = channel, now, before.ResourceVersion+1
	return after, true, updateArtifact(ctx, tx, after)
}

// Deprecate closes an artifact for versions that are not launchable yet; what has it goes on and may start again. The
// caller has checked that no launchable version names it. Deprecating a deprecated artifact changes nothing.
func Deprecate(ctx context.Context, tx db.Tx, before Artifact,
	now time.Time,
) (after Artifact, changed bool, err error) {
	if err := before.checkKept(); err != nil || before.Status == Deprecated {
		return before, false, err
	}
	after = before
	after.Status, after.UpdatedAt, after.ResourceVersion = Deprecated, now, before.ResourceVersion+1
	return after, true, updateArtifact(ctx, tx, after)
}

// checkKept refuses what is retired or revoked.
func (a Artifact) checkKept() error {
	switch a.Status {
	case Retired:
		return fault.New(fault.Conflict, codeArtifactRetired, "This artifact was retired.", nil).Permanent()
	case Revoked:
		return errRevoked()
	case Registered, Active, Deprecated:
	}
	return nil
}
