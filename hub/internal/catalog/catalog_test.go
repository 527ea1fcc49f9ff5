package catalog

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/db/dbtest"
	"github.com/gpuaas/gpuaas/pkg/fault"
	"github.com/gpuaas/gpuaas/pkg/manifest"
)

func TestAVersionMovesOnlyAlongItsLife(t *testing.T) {
	all := []Status{Draft, Staged, Canary, Active, Deprecated, Retired}
	allowed := map[Status][]Status{
		Draft:      {Staged, Active, Retired},
		Staged:     {Canary, Active, Retired},
		Canary:     {Staged, Canary, Active, Retired},
		Active:     {Deprecated},
		Deprecated: {Active, Retired},
		Retired:    nil,
	}
	for _, from := range all {
		for _, to := range all {
			err := from.mayBecome(to)
			want := false
			for _, s := range allowed[from] {
				want = want || s == to
			}
			if want {
				require.NoError(t, err, "%s to %s", from, to)
				continue
			}
			require.Equal(t, CodeVersionStatus, fault.As(err).Code, "%s to %s", from, to)
		}
	}
}

func TestAnAppIsVisibleToItsOwnerAndAPlatformAppToAll(t *testing.T) {
	require.True(t, App{}.VisibleTo("a"))
	require.True(t, App{OrgID: "a"}.VisibleTo("a"))
	require.False(t, App{OrgID: "a"}.VisibleTo("b"))
	require.False(t, App{OrgID: "a"}.VisibleTo(""))
}

func withAllModes() (m manifest.Manifest) {
	m.App.SupportedModes = manifest.SupportedModes{
		OperatingModes:     []string{"tenant_dedicated", "platform_managed"},
		ControlPlaneScopes: []string{"project", "tenant", "platform"},
	}
	return m
}

func TestModesAreTheRequestedOnesWhereAppAndPolicyAllowThem(t *testing.T) {
	for name, c := range map[string]struct {
		want      Want
		policy    Policy
		operating string
		scope     string
		boundary  string
		reasons   []string
	}{
		"without a wish, the first": {Want{}, Policy{}, "tenant_dedicated", "project", "project_isolated", nil},
		"as requested": {
			Want{OperatingMode: "tenant_dedicated", ControlPlaneScope: "tenant"},
			Policy{},
			"tenant_dedicated", "tenant", "tenant_shared",
			[]string{"as_requested", "as_requested"},
		},
		"a mode brings its scope": {
			Want{OperatingMode: "platform_managed"},
			Policy{},
			"platform_managed", "platform", "platform_shared",
			[]string{"as_requested"},
		},
		"a scope brings its mode": {
			Want{ControlPlaneScope: "platform"},
			Policy{},
			"platform_managed", "platform", "platform_shared",
			[]string{"as_requested"},
		},
		"a mode without a scope that the policy allows": {
			Want{OperatingMode: "platform_managed"},
			Policy{AllowedControlPlaneScopes: []string{"tenant"}},
			"tenant_dedicated", "tenant", "tenant_shared",
			[]string{"not_allowed_by_policy"},
		},
		"a mode that the app lacks": {
			Want{OperatingMode: "other"},
			Policy{},
			"tenant_dedicated", "project", "project_isolated",
			[]string{"not_supported_by_app"},
		},
		"a policy that leaves one": {
			Want{},
			Policy{AllowedControlPlaneScopes: []string{"platform"}},
			"platform_managed", "platform", "platform_shared", nil,
		},
	} {
		t.Run(name, func(t *testing.T) {
			r := Resolved{Version: Version{Manifest: withAllModes()}}
			require.NoError(t, r.decideModes(c.want, c.policy))
			require.Equal(t, c.operating, r.OperatingMode)
			require.Equal(t, c.scope, r.ControlPlaneScope)
			require.Equal(t, c.boundary, r.TenantBoundaryMode)
			var reasons []string
			for _, h := range r.HintResults {
				reasons = append(reasons, h.Reason)
			}
			require.Equal(t, c.reasons, reasons)
		})
	}
}

func TestModesThatContradictOrAreNotAllowedAreRefused(t *testing.T) {
	decide := func(w Want, p Policy) (Resolved, error) {
		r := Resolved{Version: Version{Manifest: withAllModes()}}
		return r, r.decideModes(w, p)
	}
	_, err := decide(Want{}, Policy{AllowedOperatingModes: []string{"other"}})
	require.Equal(t, CodePolicyRefused, fault.As(err).Code, "a policy that leaves none")
	for _, p := range []Policy{
		{AllowedOperatingModes: []string{"tenant_dedicated"}, AllowedControlPlaneScopes: []string{"platform"}},
		{AllowedOperatingModes: []string{"platform_managed"}, AllowedControlPlaneScopes: []string{"project", "tenant"}},
	} {
		_, err = decide(Want{}, p)
		require.Equal(t, CodePolicyRefused, fault.As(err).Code, "a policy that leaves a mode and a scope that contradict")
	}
	for _, w := range []Want{
		{OperatingMode: "tenant_dedicated", ControlPlaneScope: "platform"},
		{OperatingMode: "platform_managed", ControlPlaneScope: "project"},
		{OperatingMode: "platform_managed", ControlPlaneScope: "tenant"},
	} {
		_, err = decide(w, Policy{})
		require.Equal(t, CodeModesContradict, fault.As(err).Code)
		require.Equal(t, "/control_plane_scope", fault.As(err).Fields[0].Pointer)
	}
}

func TestModesOfAnUnreadableManifestAreTheMostIsolatedOnes(t *testing.T) {
	r := ModesOf([]byte("of a later release"))
	require.Equal(t, "tenant_dedicated", r.OperatingMode)
	require.Equal(t, "project", r.ControlPlaneScope)
	require.Equal(t, "project_isolated", r.TenantBoundaryMode)
	require.Equal(t, manifest.RuntimeLaunchableOCI, r.RuntimeBackend)
}

func TestADelegationEnds(t *testing.T) {
	end := time.Unix(1_800_000_000, 0)
	require.False(t, Publisher{ExpiresAt: end}.Expired(end))
	require.True(t, Publisher{ExpiresAt: end}.Expired(end.Add(time.Second)))
}

func TestASlugBelongsToTheOrgThatNamedItFirst(t *testing.T) {
	d, now := dbtest.New(t), time.Unix(1_800_000_000, 0).UTC()
	tx := func(fn func(ctx context.Context, tx db.Tx) error) {
		t.Helper()
		_, err := db.RunTx(t.Context(), d, func(tx db.Tx) (struct{}, error) { return struct{}{}, fn(t.Context(), tx) })
		require.NoError(t, err)
	}
	first, second := db.NewID(), db.NewID()
	tx(func(ctx context.Context, tx db.Tx) error {
		a, made, err := Reserve(ctx, tx, "demo", first, now)
		require.NoError(t, err)
		require.True(t, made)
		require.Equal(t, first, a.OrgID)
		_, made, err = Reserve(ctx, tx, "demo", first, now)
		require.NoError(t, err)
		require.False(t, made, "it is the org's already")
		_, _, err = Reserve(ctx, tx, "demo", second, now)
		require.Equal(t, CodeSlugTaken, fault.As(err).Code)
		n, err := CountApps(ctx, tx, first)
		require.EqualValues(t, 1, n)
		return err
	})
	tx(func(ctx context.Context, tx db.Tx) error {
		_, _, err := PutEntitlement(ctx, tx, Entitlement{
			ProjectID: db.NewID(), OrgID: first, AppSlug: "demo", Enabled: true, UpdatedBy: db.NewID(),
		}, now)
		return err
	})
	tx(func(ctx context.Context, tx db.Tx) error {
		a, err := GetApp(ctx, tx, "demo")
		require.NoError(t, err)
		moved, err := Transfer(ctx, tx, a, second, now)
		require.NoError(t, err)
		require.Equal(t, a.ResourceVersion+1, moved.ResourceVersion)
		var entitlements int
		require.NoError(t, tx.QueryRow(ctx, `SELECT count(*) FROM entitlements`).Scan(&entitlements))
		require.Zero(t, entitlements, "they were given for the app of the former org")
		return nil
	})
	tx(func(ctx context.Context, tx db.Tx) error {
		require.NoError(t, Release(ctx, tx, "demo"))
		_, err := GetApp(ctx, tx, "demo")
		require.True(t, fault.Is(err, fault.NotFound))
		return nil
	})
}

func TestAnAppWithoutAnEntitlementIsRefusedAndAForeignOneIsUnknown(t *testing.T) {
	d, now := dbtest.New(t), time.Unix(1_800_000_000, 0).UTC()
	owner, project := db.NewID(), db.NewID()
	_, err := db.RunTx(t.Context(), d, func(tx db.Tx) (struct{}, error) {
		_, _, err := Reserve(t.Context(), tx, "demo", owner, now)
		return struct{}{}, err
	})
	require.NoError(t, err)
	resolve := func(w Want) *fault.Error {
		_, err := db.ReadTx(t.Context(), d, func(tx db.Tx) (Resolved, error) { return Resolve(t.Context(), tx, w) })
		return fault.As(err)
	}
	refused := resolve(Want{AppSlug: "demo", Version: "1.0.0", OrgID: owner, ProjectID: project})
	require.Equal(t, CodeNotEntitled, refused.Code)
	foreign := resolve(Want{AppSlug: "demo", Version: "1.0.0", OrgID: db.NewID(), ProjectID: project})
	absent := resolve(Want{AppSlug: "other", Version: "1.0.0", OrgID: owner, ProjectID: project})
	require.Equal(t, absent.Error(), foreign.Error(), "a foreign app looks like an absent one")
}
