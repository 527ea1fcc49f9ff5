package iam_test

import (
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/db/dbtest"
	"github.com/gpuaas/gpuaas/hub/internal/iam"
	"github.com/gpuaas/gpuaas/hub/internal/principal"
	"github.com/gpuaas/gpuaas/pkg/fault"
)

func start() time.Time { return time.Unix(1_800_000_000, 0).UTC() }

// run is one transaction of a test.
func run[T any](t *testing.T, d *db.DB, fn func(tx db.Tx) (T, error)) (T, error) {
	t.Helper()
	return db.RunTx(t.Context(), d, fn)
}

func must[T any](t *testing.T, d *db.DB, fn func(tx db.Tx) (T, error)) T {
	t.Helper()
	out, err := run(t, d, fn)
	require.NoError(t, err)
	return out
}

// clearSealer shows that iam hands out to be sealed, and what; package secret tests the sealing.
type clearSealer struct{}

func (clearSealer) Seal(plain, aad []byte) ([]byte, error) {
	return append([]byte(string(aad)+"|"), plain...), nil
}

func (clearSealer) Open(sealed, aad []byte) ([]byte, error) {
	plain, ok := strings.CutPrefix(string(sealed), string(aad)+"|")
	if !ok {
		return nil, fault.New(fault.Internal, "aad", "other aad", nil)
	}
	return []byte(plain), nil
}

type world struct {
	d          *db.DB
	org, other iam.Org
	project    iam.Project
	sa         iam.ServiceAccount
	key        iam.Key
	// proofs are remembered, so that what is revoked or over is tested where it is known that the signature was right.
	proofs *iam.Proofs
}

func newWorld(t *testing.T) world {
	t.Helper()
	return newWorldOn(t, dbtest.New(t))
}

func newWorldOn(t *testing.T, d *db.DB) world {
	t.Helper()
	w := world{d: d, proofs: &iam.Proofs{}}
	w.org = iam.Org{ID: db.NewID(), Slug: "acme", DisplayName: "Acme", CreatedAt: start()}
	w.other = iam.Org{ID: db.NewID(), Slug: "other", DisplayName: "Other", CreatedAt: start()}
	var err error
	w.key, err = iam.NewKey(db.NewID(), start())
	require.NoError(t, err)
	must(t, w.d, func(tx db.Tx) (int, error) {
		ctx := t.Context()
		require.NoError(t, iam.CreateOrg(ctx, tx, w.org))
		require.NoError(t, iam.CreateOrg(ctx, tx, w.other))
		w.project, err = iam.CreateProject(ctx, tx, iam.Project{
			ID: db.NewID(), OrgID: w.org.ID, Slug: "demo",
			DisplayName: "Demo", CreatedAt: start(),
		})
		require.NoError(t, err)
		w.sa, err = iam.CreateServiceAccount(ctx, tx, iam.ServiceAccount{
			ID: db.NewID(), OrgID: w.org.ID,
			ProjectID: w.project.ID, Name: "CI", Slug: "ci", CreatedAt: start(),
		}, w.key)
		require.NoError(t, err)
		return 0, iam.EnsureSigningKey(ctx, tx, clearSealer{}, db.NewID(), start())
	})
	return w
}

func (w world) mint(t *testing.T, p iam.Proof, now time.Time) (iam.AccessToken, error) {
	t.Helper()
	return run(t, w.d, func(tx db.Tx) (iam.AccessToken, error) {
		return iam.Mint(t.Context(), tx, p, clearSealer{}, db.NewID(), iam.DefaultTokenTTL, now)
	})
}

func (w world) authenticate(t *testing.T, token string, now time.Time) (iam.Principal, error) {
	t.Helper()
	return db.ReadTx(t.Context(), w.d, func(tx db.Tx) (iam.Principal, error) {
		return iam.Authenticate(t.Context(), tx, w.proofs, nil, token, now)
	})
}

func (w world) byKey() iam.Proof {
	return iam.Proof{ServiceAccountID: w.sa.ID, KeyID: w.key.ID, PrivateKeyPEM: w.key.PrivateKeyPEM}
}

func TestServiceAccountTokenStandsForItsAccount(t *testing.T) {
	w := newWorld(t)
	tok, err := w.mint(t, w.byKey(), start())
	require.NoError(t, err)
	require.Equal(t, start().Add(900*time.Second), tok.ExpiresAt)
	p, err := w.authenticate(t, tok.Text, start().Add(899*time.Second))
	require.NoError(t, err)
	require.Equal(t, iam.Principal{
		Type: principal.ServiceAccount, ID: w.sa.ID, Name: "CI", OrgID: w.org.ID, ProjectID: w.project.ID,
		Bindings: []iam.Binding{{Role: iam.AppOperator, ProjectID: w.project.ID}},
	}, p)
	_, err = w.authenticate(t, tok.Text, start().Add(901*time.Second))
	require.True(t, fault.Is(err, fault.Unauthenticated), "expired: %v", err)
}

func TestWrongProofsAnswerAlike(t *testing.T) {
	w := newWorld(t)
	stranger, err := iam.NewKey(db.NewID(), start())
	require.NoError(t, err)
	ecKey := "-----BEGIN PRIVATE KEY-----\nMIGHAgEAMBMGByqGSM49AgEGCCqGSM49AwEHBG0wawIBAQQg\n-----END PRIVATE KEY-----\n"
	for name, c := range map[string]struct {
		proof iam.Proof
		kind  fault.Kind
	}{
		"unknown account": {
			iam.Proof{ServiceAccountID: db.NewID(), KeyID: w.key.ID, PrivateKeyPEM: w.key.PrivateKeyPEM},
			fault.Unauthenticated,
		},
		"unknown key": {
			iam.Proof{ServiceAccountID: w.sa.ID, KeyID: db.NewID(), PrivateKeyPEM: w.key.PrivateKeyPEM},
			fault.Unauthenticated,
		},
		"key id no id": {
			iam.Proof{ServiceAccountID: w.sa.ID, KeyID: "x", PrivateKeyPEM: w.key.PrivateKeyPEM},
			fault.Unauthenticated,
		},
		"stranger's key": {
			iam.Proof{ServiceAccountID: w.sa.ID, KeyID: w.key.ID, PrivateKeyPEM: stranger.PrivateKeyPEM},
			fault.Unauthenticated,
		},
		"no assertion": {iam.Proof{ServiceAccountID: w.sa.ID, Assertion: "x.y.z"}, fault.Unauthenticated},
		"not PEM": {
			iam.Proof{ServiceAccountID: w.sa.ID, KeyID: w.key.ID, PrivateKeyPEM: "nonsense"},
			fault.Unprocessable,
		},
		"not Ed25519": {iam.Proof{ServiceAccountID: w.sa.ID, KeyID: w.key.ID, PrivateKeyPEM: ecKey}, fault.Unprocessable},
		"nothing":     {iam.Proof{ServiceAccountID: w.sa.ID}, fault.Unprocessable},
		"both": {iam.Proof{
			ServiceAccountID: w.sa.ID, KeyID: w.key.ID, PrivateKeyPEM: w.key.PrivateKeyPEM,
			Assertion: "a",
		}, fault.Unprocessable},
		"account no id": {
			iam.Proof{ServiceAccountID: "'; --", KeyID: w.key.ID, PrivateKeyPEM: w.key.PrivateKeyPEM},
			fault.Unprocessable,
		},
	} {
		_, err := w.mint(t, c.proof, start())
		require.True(t, fault.Is(err, c.kind), "%s: %v", name, err)
		if c.kind == fault.Unauthenticated {
			require.EqualValues(t, "credentials_invalid", fault.As(err).Code, name)
		} else {
			require.NotEmpty(t, fault.As(err).Fields, name)
		}
		require.NotContains(t, err.Error(), "MIGHAgEA")
	}
}

func TestUserTokenCountsUntilItExpiresOrIsRevoked(t *testing.T) {
	w := newWorld(t)
	text := iam.NewUserToken()
	user := must(t, w.d, func(tx db.Tx) (iam.User, error) {
		u, err := iam.CreateUser(t.Context(), tx, iam.User{
			ID: db.NewID(), OrgID: w.org.ID, Email: "Ann@Example.org",
			DisplayName: "Ann", Roles: []iam.Role{iam.OrgBilling, iam.OrgAdmin, iam.OrgAdmin}, CreatedAt: start(),
		})
		require.NoError(t, err)
		require.Equal(t, "ann@example.org", u.Email)
		return u, iam.CreateUserToken(t.Context(), tx, iam.UserToken{
			ID: db.NewID(), UserID: u.ID, CreatedAt: start(),
			ExpiresAt: start().Add(time.Hour),
		}, text)
	})
	p, err := w.authenticate(t, text, start().Add(59*time.Minute))
	require.NoError(t, err)
	require.Equal(t, user.ID, p.ID)
	require.Equal(t, []iam.Binding{{Role: iam.OrgAdmin}, {Role: iam.OrgBilling}}, p.Bindings)
	_, err = w.authenticate(t, text, start().Add(time.Hour))
	require.True(t, fault.Is(err, fault.Unauthenticated), "expired")
	_, err = w.authenticate(t, text+"x", start())
	require.True(t, fault.Is(err, fault.Unauthenticated), "another token")
	must(t, w.d, func(tx db.Tx) (int64, error) {
		_, revoked, err := iam.RevokeUserTokens(t.Context(), tx, user, start())
		return revoked, err
	})
	_, err = w.authenticate(t, text, start())
	require.True(t, fault.Is(err, fault.Unauthenticated), "revoked")

	for _, junk := range []string{"", "x", "a.b.c", "gpuaas_ut_", strings.Repeat("a", 10000), "e30.e30.e30", "\x00"} {
		_, err := w.authenticate(t, junk, start())
		require.True(t, fault.Is(err, fault.Unauthenticated), "%q: %v", junk, err)
	}
}

func TestAUserHasFiftyTokensBesideItsSessions(t *testing.T) {
	w := newWorld(t)
	bob := w.join(t, "bob@acme.example")
	create := func(made time.Time) error {
		_, err := run(t, w.d, func(tx db.Tx) (int, error) {
			return 0, iam.CreateUserToken(t.Context(), tx, iam.UserToken{
				ID: db.NewID(), UserID: bob.ID, CreatedAt: made, ExpiresAt: made.Add(time.Hour),
			}, iam.NewUserToken())
		})
		return err
	}
	must(t, w.d, func(tx db.Tx) (iam.SessionTokens, error) {
		return iam.StartSession(t.Context(), tx, iam.NewSessionTokens("browser", "192.0.2.1", start()), bob)
	})
	for range 50 {
		require.NoError(t, create(start()))
	}
	require.True(t, fault.Is(create(start().Add(time.Hour-time.Second)), fault.Conflict))
	require.NoError(t, create(start().Add(time.Hour)), "those that have expired do not count")
}

// An administrator ends tokens of the users of their own org: the id of another's is that of nothing.
func TestLaw10ATokenEndsInItsOwnUsersNameAlone(t *testing.T) {
	w := newWorld(t)
	bob, eve := w.join(t, "bob@acme.example"), w.join(t, "eve@acme.example")
	token, text := iam.UserToken{
		ID: db.NewID(), UserID: eve.ID, CreatedAt: start(), ExpiresAt: start().Add(time.Hour),
	}, iam.NewUserToken()
	must(t, w.d, func(tx db.Tx) (int, error) { return 0, iam.CreateUserToken(t.Context(), tx, token, text) })
	revoke := func(userID string) error {
		_, err := run(t, w.d, func(tx db.Tx) (int, error) {
			return 0, iam.RevokeUserToken(t.Context(), tx, userID, token.ID, start())
		})
		return err
	}
	require.True(t, fault.Is(revoke(bob.ID), fault.NotFound))
	_, err := w.authenticate(t, text, start())
	require.NoError(t, err)
	require.NoError(t, revoke(eve.ID))
	_, err = w.authenticate(t, text, start())
	require.True(t, fault.Is(err, fault.Unauthenticated), "%v", err)
	require.True(t, fault.Is(revoke(eve.ID), fault.NotFound), "it has ended")
}

func TestFirstAdminIsMadeOnceAndRecovered(t *testing.T) {
	w := newWorld(t)
	first, second := iam.NewUserToken(), iam.NewUserToken()
	boot := func(text string) bool {
		return must(t, w.d, func(tx db.Tx) (bool, error) {
			_, made, err := iam.Bootstrap(t.Context(), tx, db.NewID(), db.NewID(), text, start())
			return made, err
		})
	}
	require.True(t, boot(first))
	require.False(t, boot(second))
	p, err := w.authenticate(t, first, start())
	require.NoError(t, err)
	require.True(t, p.PlatformAdmin)
	_, err = w.authenticate(t, second, start())
	require.True(t, fault.Is(err, fault.Unauthenticated), "%v", err)

	third := iam.NewUserToken()
	must(t, w.d, func(tx db.Tx) (iam.User, error) {
		return iam.RecoverAdmin(t.Context(), tx, db.NewID(), third, start().Add(time.Hour))
	})
	_, err = w.authenticate(t, third, start().Add(time.Hour))
	require.NoError(t, err)
	_, err = w.authenticate(t, first, start().Add(time.Hour))
	require.True(t, fault.Is(err, fault.Unauthenticated), "the lost token is worth nothing: %v", err)
}

func TestNamesAreCheckedAndTaken(t *testing.T) {
	w := newWorld(t)
	for name, c := range map[string]struct {
		do   func(tx db.Tx) error
		kind fault.Kind
	}{
		"org taken": {func(tx db.Tx) error {
			return iam.CreateOrg(t.Context(), tx, iam.Org{ID: db.NewID(), Slug: "acme", DisplayName: "x", CreatedAt: start()})
		}, fault.Conflict},
		"org slug": {func(tx db.Tx) error {
			return iam.CreateOrg(t.Context(), tx, iam.Org{ID: db.NewID(), Slug: "Acme_", DisplayName: "x", CreatedAt: start()})
		}, fault.Unprocessable},
		"project taken": {func(tx db.Tx) error {
			_, err := iam.CreateProject(t.Context(), tx, iam.Project{
				ID: db.NewID(), OrgID: w.org.ID, Slug: "demo",
				DisplayName: "x", CreatedAt: start(),
			})
			return err
		}, fault.Conflict},
		"project of no org": {func(tx db.Tx) error {
			_, err := iam.CreateProject(t.Context(), tx, iam.Project{
				ID: db.NewID(), OrgID: db.NewID(), Slug: "demo",
				DisplayName: "x", CreatedAt: start(),
			})
			return err
		}, fault.NotFound},
		"account taken": {func(tx db.Tx) error {
			_, err := iam.CreateServiceAccount(t.Context(), tx, iam.ServiceAccount{
				ID: db.NewID(), OrgID: w.org.ID,
				ProjectID: w.project.ID, Name: "CI", Slug: "ci", CreatedAt: start(),
			}, w.key)
			return err
		}, fault.Conflict},
		"account as admin": {func(tx db.Tx) error {
			_, err := iam.CreateServiceAccount(t.Context(), tx, iam.ServiceAccount{
				ID: db.NewID(), OrgID: w.org.ID,
				ProjectID: w.project.ID, Name: "CI", Slug: "ci2", Role: iam.ProjectAdmin, CreatedAt: start(),
			}, w.key)
			return err
		}, fault.Unprocessable},
		"user of no org": {func(tx db.Tx) error {
			_, err := iam.CreateUser(t.Context(), tx, iam.User{
				ID: db.NewID(), Email: "a@b", DisplayName: "x",
				CreatedAt: start(),
			})
			return err
		}, fault.Unprocessable},
		"user role": {func(tx db.Tx) error {
			_, err := iam.CreateUser(t.Context(), tx, iam.User{
				ID: db.NewID(), OrgID: w.org.ID, Email: "a@b", DisplayName: "x",
				Roles: []iam.Role{"platform_admin"}, CreatedAt: start(),
			})
			return err
		}, fault.Unprocessable},
	} {
		_, err := run(t, w.d, func(tx db.Tx) (int, error) { return 0, c.do(tx) })
		require.True(t, fault.Is(err, c.kind), "%s: %v", name, err)
	}
	// A deleted account's slug is free again.
	must(t, w.d, func(tx db.Tx) (int, error) {
		_, err := iam.DeleteServiceAccount(t.Context(), tx, w.sa, start())
		require.NoError(t, err)
		key, err := iam.NewKey(db.NewID(), start())
		require.NoError(t, err)
		_, err = iam.CreateServiceAccount(t.Context(), tx, iam.ServiceAccount{
			ID: db.NewID(), OrgID: w.org.ID,
			ProjectID: w.project.ID, Name: "CI", Slug: "ci", CreatedAt: start(),
		}, key)
		return 0, err
	})
}

func TestListsShowWhatTheCallerMaySee(t *testing.T) {
	w := newWorld(t)
	second := must(t, w.d, func(tx db.Tx) (iam.Project, error) {
		return iam.CreateProject(t.Context(), tx, iam.Project{
			ID: db.NewID(), OrgID: w.org.ID, Slug: "two",
			DisplayName: "Two", CreatedAt: start(),
		})
	})
	foreign := must(t, w.d, func(tx db.Tx) (iam.Project, error) {
		return iam.CreateProject(t.Context(), tx, iam.Project{
			ID: db.NewID(), OrgID: w.other.ID, Slug: "demo",
			DisplayName: "Demo", CreatedAt: start(),
		})
	})
	admin := iam.Principal{Type: principal.User, ID: db.NewID(), PlatformAdmin: true}
	member := iam.Principal{
		Type: principal.User, ID: db.NewID(), OrgID: w.org.ID,
		Bindings: []iam.Binding{{Role: iam.OrgMember}},
	}
	narrow := iam.Principal{
		Type: principal.User, ID: db.NewID(), OrgID: w.org.ID,
		Bindings: []iam.Binding{{Role: iam.Viewer, ProjectID: second.ID}},
	}
	robot := iam.Principal{
		Type: principal.ServiceAccount, ID: w.sa.ID, OrgID: w.org.ID, ProjectID: w.project.ID,
		Bindings: []iam.Binding{{Role: iam.AppOperator, ProjectID: w.project.ID}},
	}
	for name, c := range map[string]struct {
		p    iam.Principal
		org  string
		want []string
	}{
		"platform admin":         {admin, "", []string{w.project.ID, second.ID, foreign.ID}},
		"platform admin, an org": {admin, w.other.ID, []string{foreign.ID}},
		"member":                 {member, "", []string{w.project.ID, second.ID}},
		"member, another's org":  {member, w.other.ID, nil},
		"one project":            {narrow, "", []string{second.ID}},
		"service account":        {robot, "", []string{w.project.ID}},
		"nobody":                 {iam.Principal{}, "", nil},
	} {
		projects := must(t, w.d, func(tx db.Tx) ([]iam.Project, error) {
			return iam.ListProjects(t.Context(), tx, c.p, c.org, db.Page{})
		})
		var ids []string
		for _, p := range projects {
			ids = append(ids, p.ID)
		}
		require.ElementsMatch(t, c.want, ids, name)
	}
	for p, want := range map[*iam.Principal]int{&admin: 2, &member: 1, {}: 0} {
		orgs := must(t, w.d, func(tx db.Tx) ([]iam.Org, error) { return iam.ListOrgs(t.Context(), tx, *p, db.Page{}) })
		require.Len(t, orgs, want)
	}
	first := must(t, w.d, func(tx db.Tx) ([]iam.Org, error) {
		return iam.ListOrgs(t.Context(), tx, admin, db.Page{Limit: 1})
	})
	rest := must(t, w.d, func(tx db.Tx) ([]iam.Org, error) {
		return iam.ListOrgs(t.Context(), tx, admin, db.Page{After: first[0].ID})
	})
	require.Equal(t, []string{"acme", "other"}, []string{first[0].Slug, rest[0].Slug})
	require.Len(t, rest, 1, "no page repeats the last org of the one before")
	_, err := run(t, w.d, func(tx db.Tx) ([]iam.Org, error) {
		return iam.ListOrgs(t.Context(), tx, admin, db.Page{After: "x"})
	})
	require.True(t, fault.Is(err, fault.Malformed), "%v", err)
}
