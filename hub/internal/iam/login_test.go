package iam_test

import (
	"crypto/sha256"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/iam"
	"github.com/gpuaas/gpuaas/pkg/fault"
)

// join makes a user with a password by an invitation.
func (w world) join(t *testing.T, email string) iam.User {
	t.Helper()
	_, _, token := w.invite(t, w.org.ID, email)
	return must(t, w.d, func(tx db.Tx) (iam.User, error) {
		return iam.AcceptInvitation(t.Context(), tx, clearSealer{}, db.NewID(), iam.Acceptance{
			Token: token, DisplayName: "Bob", PasswordHash: "hash of " + email,
		}, start())
	})
}

func (w world) passwordOf(t *testing.T, email string) iam.Password {
	t.Helper()
	return must(t, w.d, func(tx db.Tx) (iam.Password, error) { return iam.PasswordOf(t.Context(), tx, email) })
}

func (w world) login(t *testing.T, p iam.Password) error {
	t.Helper()
	_, err := run(t, w.d, func(tx db.Tx) (iam.User, error) {
		return iam.CheckLogin(t.Context(), tx, clearSealer{}, p, "", start())
	})
	return err
}

func TestALoginEndsWithItsUserAndWithNoOther(t *testing.T) {
	w := newWorld(t)
	bob, eve := w.join(t, "bob@acme.example"), w.join(t, "eve@acme.example")
	ofBob, ofEve := w.passwordOf(t, bob.Email), w.passwordOf(t, eve.Email)
	require.Equal(t, "hash of bob@acme.example", ofBob.Hash)
	require.NoError(t, w.login(t, ofBob))
	changed := ofBob
	changed.Hash = "of before a change"
	require.True(t, fault.Is(w.login(t, changed), fault.Unauthenticated))

	// Each password was read while its user was active.
	bob = must(t, w.d, func(tx db.Tx) (iam.User, error) {
		return iam.SetUserDisabled(t.Context(), tx, bob, true, start())
	})
	require.True(t, fault.Is(w.login(t, ofBob), fault.Unauthenticated))
	require.NoError(t, w.login(t, ofEve))
	must(t, w.d, func(tx db.Tx) (iam.User, error) { return iam.RemoveFromOrg(t.Context(), tx, bob, start()) })
	require.True(t, fault.Is(w.login(t, ofBob), fault.Unauthenticated))
	require.Equal(t, ofEve, w.passwordOf(t, eve.Email))
	require.NoError(t, w.login(t, ofEve))
}

// The quota is of tokens that users make: who logs in often uses none of it up.
func TestALoginUsesNothingOfTheQuotaOfTokens(t *testing.T) {
	w := newWorld(t)
	bob := w.join(t, "bob@acme.example")
	must(t, w.d, func(tx db.Tx) (iam.SessionTokens, error) {
		return iam.StartSession(t.Context(), tx, iam.NewSessionTokens("", "", start()), bob)
	})
	used := func() int64 {
		return must(t, w.d, func(tx db.Tx) (iam.Limits, error) {
			return iam.Usage(t.Context(), tx, w.org.ID, start())
		})[iam.QuotaUserTokens]
	}
	require.Zero(t, used())
	must(t, w.d, func(tx db.Tx) (struct{}, error) {
		return struct{}{}, iam.CreateUserToken(t.Context(), tx, iam.UserToken{
			ID: db.NewID(), UserID: bob.ID, CreatedAt: start(), ExpiresAt: start().Add(time.Hour),
		}, iam.NewUserToken())
	})
	require.EqualValues(t, 1, used())
}

// A provider's texts may hold what no row takes, and an address more bytes than a name.
func TestAnIdentityWithTextsThatNoRowTakesIsRefusedOrCleaned(t *testing.T) {
	w := newWorld(t)
	find := func(id iam.Identity) (iam.User, error) {
		id.Issuer, id.OrgSlug = "https://id.example", w.org.Slug
		return run(t, w.d, func(tx db.Tx) (iam.User, error) {
			u, _, err := iam.UserOfIdentity(t.Context(), tx, id, db.NewID(), start())
			return u, err
		})
	}
	for why, id := range map[string]iam.Identity{
		"subject": {Subject: "a\x00", Email: "a@acme.example"},
		"address": {Subject: "b", Email: "b\x00@acme.example"},
	} {
		_, err := find(id)
		require.True(t, fault.Is(err, fault.Unauthenticated), "%s: %v", why, err)
	}
	u, err := find(iam.Identity{Subject: "c", Email: "c@acme.example", DisplayName: "Car\x00ol\n"})
	require.NoError(t, err)
	require.Equal(t, "Carol", u.DisplayName)
	long := strings.Repeat("a", 127) + "é@acme.example"
	u, err = find(iam.Identity{Subject: "d", Email: long})
	require.NoError(t, err)
	require.Equal(t, strings.Repeat("a", 127), u.DisplayName, "cut at a whole character")
}

func TestASessionEndsOnceAndByItsOwnUser(t *testing.T) {
	w := newWorld(t)
	bob, eve := w.join(t, "bob@acme.example"), w.join(t, "eve@acme.example")
	begin := func(u iam.User) string {
		return must(t, w.d, func(tx db.Tx) (iam.SessionTokens, error) {
			return iam.StartSession(t.Context(), tx, iam.NewSessionTokens("browser", "192.0.2.1", start()), u)
		}).Session.ID
	}
	list := func(now time.Time) (ids []string) {
		for _, s := range must(t, w.d, func(tx db.Tx) ([]iam.Session, error) {
			return iam.ListSessions(t.Context(), tx, bob.ID, now, db.Page{Limit: 10})
		}) {
			ids = append(ids, s.ID)
		}
		return ids
	}
	revoke := func(userID, id string, now time.Time) error {
		_, err := run(t, w.d, func(tx db.Tx) (int, error) {
			if err := iam.CheckSession(t.Context(), tx, userID, id, now); err != nil {
				return 0, err
			}
			return 0, iam.EndSession(t.Context(), tx, id, now)
		})
		return err
	}
	one, two, other := begin(bob), begin(bob), begin(eve)
	end := start().Add(24 * time.Hour)
	require.ElementsMatch(t, []string{one, two}, list(end.Add(-time.Second)))
	require.Empty(t, list(end))
	require.True(t, fault.Is(revoke(bob.ID, other, start()), fault.NotFound))
	require.True(t, fault.Is(revoke(bob.ID, "no id", start()), fault.NotFound))
	require.True(t, fault.Is(revoke(bob.ID, one, end), fault.NotFound), "it is over")
	require.NoError(t, revoke(bob.ID, one, start()))
	require.True(t, fault.Is(revoke(bob.ID, one, start()), fault.NotFound))
	require.Equal(t, []string{two}, list(start()))
}

// A session that is refreshed again and again ends after a week, and its last access token with it.
func TestNothingOfASessionOutlivesItsWeek(t *testing.T) {
	w := newWorld(t)
	bob := w.join(t, "bob@acme.example")
	tokens := must(t, w.d, func(tx db.Tx) (iam.SessionTokens, error) {
		return iam.StartSession(t.Context(), tx, iam.NewSessionTokens("browser", "192.0.2.1", start()), bob)
	})
	refresh := func(now time.Time) (next iam.SessionTokens, err error) {
		return run(t, w.d, func(tx db.Tx) (iam.SessionTokens, error) {
			next, _, err = iam.RefreshSession(t.Context(), tx, tokens.Refresh, iam.NewSessionTokens("", "", now))
			return next, err
		})
	}
	end := start().Add(7 * 24 * time.Hour)
	var err error
	for now := start().Add(23 * time.Hour); now.Before(end); now = now.Add(23 * time.Hour) {
		tokens, err = refresh(now)
		require.NoError(t, err)
	}
	tokens, err = refresh(end.Add(-time.Minute))
	require.NoError(t, err)
	require.Equal(t, end, tokens.AccessExpiresAt)
	_, err = w.authenticate(t, tokens.Access, end.Add(-time.Millisecond))
	require.NoError(t, err)
	_, err = w.authenticate(t, tokens.Access, end)
	require.True(t, fault.Is(err, fault.Unauthenticated), "%v", err)
	_, err = refresh(end)
	require.True(t, fault.Is(err, fault.Unauthenticated), "%v", err)
}

func TestTheLastPlatformAdminStaysOne(t *testing.T) {
	w := newWorld(t)
	admin := func(email string) iam.User {
		return must(t, w.d, func(tx db.Tx) (iam.User, error) {
			return iam.CreateUser(t.Context(), tx, iam.User{
				ID: db.NewID(), Email: email, DisplayName: "Root", PlatformAdmin: true, CreatedAt: start(),
			})
		})
	}
	disable := func(u iam.User) error {
		_, err := run(t, w.d, func(tx db.Tx) (iam.User, error) {
			return iam.SetUserDisabled(t.Context(), tx, u, true, start())
		})
		return err
	}
	one := admin("one@gpuaas.example")
	require.True(t, fault.Is(disable(one), fault.Conflict))
	require.NoError(t, disable(w.join(t, "bob@acme.example")), "no platform admin")
	two := admin("two@gpuaas.example")
	require.NoError(t, disable(one))
	require.True(t, fault.Is(disable(two), fault.Conflict), "the other one's tokens do not count")
}

// Law 11: what finishes a login at the identity provider is a secret of the person who logs in.
func TestLaw11TheSecretOfALoginUnderWayIsStoredSealed(t *testing.T) {
	w := newWorld(t)
	login := iam.ExternalLogin{Handle: iam.NewHandle(), Secret: []byte("verifier"), ExpiresAt: start().Add(time.Minute)}
	stored := must(t, w.d, func(tx db.Tx) ([]byte, error) {
		if err := iam.StartExternalLogin(t.Context(), tx, clearSealer{}, login, start()); err != nil {
			return nil, err
		}
		return db.Value[[]byte](t.Context(), tx, `SELECT sealed_secret FROM external_logins`)
	})
	hash := sha256.Sum256([]byte(login.Handle))
	sealed, err := clearSealer{}.Seal(login.Secret, hash[:])
	require.NoError(t, err)
	require.Equal(t, sealed, stored, "it is sealed to its row")
	require.Equal(t, login.Secret, must(t, w.d, func(tx db.Tx) ([]byte, error) {
		return iam.ExternalLoginSecret(t.Context(), tx, clearSealer{}, login.Handle, start())
	}))
}
