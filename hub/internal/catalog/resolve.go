package catalog

import (
	"context"
	"crypto/sha256"
	"encoding/binary"
	"slices"
	"time"

	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/pkg/fault"
	"github.com/gpuaas/gpuaas/pkg/manifest"
)

// Want is a wish to run an app. The modes are hints.
type Want struct {
	AppSlug, Version                 string
	OrgID, ProjectID                 string
	OperatingMode, ControlPlaneScope string
	// Trial lets a platform admin launch what is staged, and each canary. The org that owns the app needs no Trial.
	Trial                      bool
	ParametersJSON, ConfigJSON []byte
	// Now, where set, refuses a version whose publisher's delegation has ended: the node would refuse it as well.
	Now time.Time
	// Revoked, where set, says whether the trust bundle has revoked a key.
	Revoked func(keyID string) bool
	// MinVersion, where set, gives the lowest version of an app that the trust bundle lets start; empty for any.
	MinVersion func(appSlug string) string
}

// Hint says what became of a requested mode.
type Hint struct {
	Field, Requested, Effective, Reason string
}

// Resolved is what the server decided.
type Resolved struct {
	App     App
	Version Version
	// Parameters are the tenant's, checked; defaults are added where the services are lowered.
	Parameters map[string]any
	Config     map[string]any
	// ManifestEnvelope and DelegationEnvelope are protobuf; the latter is empty where a catalog key signed directly.
	ManifestEnvelope   []byte
	DelegationEnvelope []byte

	OperatingMode      string
	ControlPlaneScope  string
	RuntimeBackend     string
	TenantBoundaryMode string
	HintResults        []Hint
	// MaxAccelerators is 0 for no limit.
	MaxAccelerators int
}

// Resolve decides what runs: the project must be entitled to the app, the version active and allowed, parameters and
// config valid; modes are the requested ones where app and policy allow them, else the first that both do.
func Resolve(ctx context.Context, tx db.Tx, w Want) (Resolved, error) {
	a, v, e, err := entitled(ctx, tx, w)
	if err != nil {
		return Resolved{}, err
	}
	if err := v.checkLaunchable(a, w); err != nil {
		return Resolved{}, err
	}
	out := Resolved{
		App: a, Version: v, ManifestEnvelope: v.ManifestEnvelope, RuntimeBackend: v.Manifest.Version.RuntimeBackend,
		MaxAccelerators: e.Policy.MaxAccelerators,
	}
	if out.DelegationEnvelope, err = delegationOf(ctx, tx, v, w); err != nil {
		return Resolved{}, err
	}
	if out.Parameters, err = v.Manifest.CheckParameters(w.ParametersJSON); err != nil {
		return Resolved{}, err
	}
	if out.Config, err = v.Manifest.CheckConfig(w.ConfigJSON); err != nil {
		return Resolved{}, err
	}
	return out, out.decideModes(w, e.Policy)
}

// checkLaunchable refuses a version that the project may not launch in its status.
func (v Version) checkLaunchable(a App, w Want) error {
	trial := w.Trial || a.OrgID != "" && a.OrgID == w.OrgID
	switch {
	case v.Status == Active, v.Status == Staged && trial, v.Status == Canary && (trial || v.inCanary(w.ProjectID)):
		return nil
	case v.Status == Canary:
		return conflict(CodeVersionNotActive, "The version is a canary, which only some projects can launch for now; choose "+
			"an active version.").
			WithField("/version", "is a canary for other projects")
	}
	return conflict(CodeVersionNotActive, "Only active versions can be launched; this one is "+string(v.Status)+".").
		WithField("/version", "is not active")
}

// inCanary reports whether a project is of the share that may launch the canary. A project stays in while the share
// grows; every version has other projects first.
func (v Version) inCanary(projectID string) bool {
	sum := sha256.Sum256([]byte(v.ID + "/" + projectID))
	return binary.BigEndian.Uint64(sum[:])%100 < uint64(v.CanaryPercent)
}

// CheckRestartable decides whether a version that an instance has been running may start once more: the project must
// still be entitled to it, and the version must not be retired. It returns the delegation to run it under, which may be
// newer than the one before.
func CheckRestartable(ctx context.Context, tx db.Tx, w Want) (delegationEnvelope []byte, err error) {
	_, v, _, err := entitled(ctx, tx, w)
	if err != nil {
		return nil, err
	}
	if v.Status == Draft || v.Status == Retired {
		return nil, conflict(CodeVersionNotActive, "The version may not be started again; it is "+string(v.Status)+
			".").WithField(
			"/version", "is not active")
	}
	return delegationOf(ctx, tx, v, w)
}

// entitled finds app and version, and the entitlement that lets the project run it.
func entitled(ctx context.Context, tx db.Tx, w Want) (App, Version, Entitlement, error) {
	refuse := func(err error) (App, Version, Entitlement, error) { return App{}, Version{}, Entitlement{}, err }
	var (
		a App
		e Entitlement
		v Version
	)
	err := db.Together(ctx, tx, func(tx db.Tx) (err error) {
		a, err = GetApp(ctx, tx, w.AppSlug)
		if fault.Is(err, fault.NotFound) || err == nil && !a.VisibleTo(w.OrgID) {
			return unknown("/app_slug", "names no app of the catalogue")
		}
		return err
	}, func(tx db.Tx) (err error) {
		e, err = GetEntitlement(ctx, tx, w.ProjectID, w.AppSlug)
		if fault.Is(err, fault.NotFound) || err == nil && !e.Enabled {
			return fault.New(fault.Forbidden, CodeNotEntitled, "The project is not entitled to this app; ask an org "+
				"admin for an entitlement.", nil).
				WithField("/app_slug", "the project has no entitlement to it").Permanent()
		}
		return err
	}, func(tx db.Tx) (err error) {
		v, err = GetVersion(ctx, tx, w.AppSlug, w.Version)
		if fault.Is(err, fault.NotFound) {
			return unknown("/version", "names no version of the app")
		}
		return err
	})
	if err != nil {
		return refuse(err)
	}
	if len(e.Policy.AllowedVersions) > 0 && !slices.Contains(e.Policy.AllowedVersions, v.Version) {
		return refuse(policyRefused("/version", "the project's entitlement does not allow this version"))
	}
	return a, v, e, nil
}

func (r *Resolved) decideModes(w Want, p Policy) error {
	if w.OperatingMode != "" && w.ControlPlaneScope != "" &&
		manifest.TenantBoundaryMode(w.OperatingMode, w.ControlPlaneScope) == "" {
		return fault.New(fault.Unprocessable, CodeModesContradict, "The operating mode and the control plane scope "+
			"contradict each other: what the platform manages has the scope platform, and nothing else has.", nil).
			WithField("/control_plane_scope", "contradicts the operating mode").Permanent()
	}
	modes := r.Version.Manifest.App.SupportedModes
	scopes := slices.DeleteFunc(slices.Clone(modes.ControlPlaneScopes), func(scope string) bool {
		return !permitted(scope, p.AllowedControlPlaneScopes)
	})
	if w.ControlPlaneScope != "" && slices.Contains(scopes, w.ControlPlaneScope) {
		scopes = []string{w.ControlPlaneScope}
	}
	operating := slices.DeleteFunc(slices.Clone(modes.OperatingModes), func(mode string) bool {
		return !slices.ContainsFunc(scopes, func(scope string) bool {
			return manifest.TenantBoundaryMode(mode, scope) != ""
		})
	})
	var err error
	if r.OperatingMode, err = r.choose("operating_mode", w.OperatingMode, modes.OperatingModes, func(mode string) bool {
		return slices.Contains(operating, mode) && permitted(mode, p.AllowedOperatingModes)
	}); err != nil {
		return err
	}
	fitting := slices.DeleteFunc(slices.Clone(modes.ControlPlaneScopes), func(scope string) bool {
		return manifest.TenantBoundaryMode(r.OperatingMode, scope) == ""
	})
	if r.ControlPlaneScope, err = r.choose("control_plane_scope", w.ControlPlaneScope, fitting, func(scope string) bool {
		return permitted(scope, p.AllowedControlPlaneScopes)
	}); err != nil {
		return err
	}
	r.TenantBoundaryMode = manifest.TenantBoundaryMode(r.OperatingMode, r.ControlPlaneScope)
	return nil
}

func permitted(mode string, allowed []string) bool {
	return len(allowed) == 0 || slices.Contains(allowed, mode)
}

// ModesOf gives the modes that a version has without hints and without a policy: for an instance whose own are lost.
func ModesOf(manifestDocument []byte) Resolved {
	m, err := manifest.Parse(manifestDocument)
	if err != nil {
		// Signed by a publisher and running; a form that this release does not know is no reason to lose it.
		m = manifest.Manifest{}
		m.App.SupportedModes = manifest.SupportedModes{
			OperatingModes:     []string{"tenant_dedicated"},
			ControlPlaneScopes: []string{"project"},
		}
		m.Version.RuntimeBackend = manifest.RuntimeLaunchableOCI
	}
	r := Resolved{Version: Version{Manifest: m}, RuntimeBackend: m.Version.RuntimeBackend}
	// Without a policy every mode that the app supports is allowed.
	_ = r.decideModes(Want{}, Policy{})
	return r
}

func (r *Resolved) choose(field, requested string, supported []string, may func(string) bool) (string, error) {
	i := slices.IndexFunc(supported, may)
	if i < 0 {
		return "", policyRefused("/"+field, "the project's entitlement allows none that the app supports")
	}
	if requested == "" {
		return supported[i], nil
	}
	h := Hint{Field: field, Requested: requested, Effective: requested, Reason: "as_requested"}
	switch {
	case !slices.Contains(supported, requested):
		h.Effective, h.Reason = supported[i], "not_supported_by_app"
	case !may(requested):
		h.Effective, h.Reason = supported[i], "not_allowed_by_policy"
	}
	r.HintResults = append(r.HintResults, h)
	return h.Effective, nil
}

// delegationOf returns the newest delegation under which the version was signed: a renewed one serves versions that
// were registered under the old one.
func delegationOf(ctx context.Context, tx db.Tx, v Version, w Want) ([]byte, error) {
	if w.Revoked != nil && w.Revoked(v.PublisherKeyID) {
		return nil, conflict(CodePublisherInvalid, "The key that signed this version was revoked; the publisher has to "+
			"sign a new one.").
			WithField("/version", "was signed by a revoked key")
	}
	if w.MinVersion != nil {
		if floor := w.MinVersion(v.AppSlug); floor != "" && manifest.Older(v.Version, floor) {
			return nil, conflict(manifest.CodeTooOld, "The version may not start any more; take "+floor+" or a later one.").
				WithField("/version", "is older than the lowest version that the platform accepts")
		}
	}
	if !v.Delegated {
		return nil, nil
	}
	p, found, err := selectPublisher(ctx, tx, v.PublisherKeyID, v.PublisherOrgSlug)
	if err != nil {
		return nil, err
	}
	if !found || !w.Now.IsZero() && p.Expired(w.Now) {
		return nil, conflict(CodePublisherInvalid, "The delegation of this version's publisher has ended; a platform admin "+
			"has to renew it.").
			WithField("/version", "has a publisher without a valid delegation")
	}
	return p.DelegationEnvelope, nil
}

func unknown(pointer, reason string) error {
	return fault.New(fault.Unprocessable, fault.CodeReferenceUnknown, "The request names something that does not exist.",
		nil).WithField(pointer, reason).Permanent()
}

func policyRefused(pointer, reason string) error {
	return fault.New(fault.Forbidden, CodePolicyRefused, "The project's entitlement does not allow this.", nil).WithField(
		pointer,
		reason).Permanent()
}
