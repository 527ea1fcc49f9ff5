package secret_test

import (
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/db/dbtest"
	"github.com/gpuaas/gpuaas/hub/internal/secret"
	"github.com/gpuaas/gpuaas/hub/plan"
	"github.com/gpuaas/gpuaas/pkg/fault"
	"github.com/gpuaas/gpuaas/protocol"
)

func start() time.Time { return time.Unix(1_800_000_000, 0).UTC() }

func newSecret(name string) secret.Secret {
	return secret.Secret{
		ID: db.NewID(), OrgID: db.NewID(), ProjectID: db.NewID(), Name: name, Version: 1, Status: secret.StatusActive,
		ResourceVersion: 1, CreatedAt: start(), UpdatedAt: start(),
	}
}

func write(t *testing.T, d *db.DB, fn func(tx db.Tx) error) error {
	t.Helper()
	return db.WriteTx(t.Context(), d, fn)
}

func TestLaw10ASecretIsFoundInItsOwnProjectOnly(t *testing.T) {
	d := dbtest.New(t)
	mine, theirs := newSecret("key"), newSecret("key")
	other := newSecret("other")
	other.ProjectID = mine.ProjectID
	require.NoError(t, write(t, d, func(tx db.Tx) error {
		for _, s := range []secret.Secret{other, theirs, mine} {
			require.NoError(t, secret.Put(t.Context(), tx, s, []byte(s.ID)))
		}
		got, err := secret.Get(t.Context(), tx, mine.ProjectID, mine.ID)
		require.NoError(t, err)
		require.Equal(t, mine.ID, got.ID)
		got, err = secret.ByName(t.Context(), tx, mine.ProjectID, "key")
		require.NoError(t, err)
		require.Equal(t, mine.ID, got.ID)
		sealed, err := secret.SealedValue(t.Context(), tx, mine.ID)
		require.NoError(t, err)
		require.Equal(t, mine.ID, string(sealed))
		for id, project := range map[string]string{mine.ID: theirs.ProjectID, theirs.ID: mine.ProjectID} {
			_, err := secret.Get(t.Context(), tx, project, id)
			require.True(t, fault.Is(err, fault.NotFound), "%v", err)
		}
		return nil
	}))
}

// What is sealed for one member is neither told to another nor counted as its own.
func TestLaw10AMemberGetsWhatIsSealedForItAlone(t *testing.T) {
	d := dbtest.New(t)
	of, another := newSecret("key"), newSecret("another")
	of.Version = 7
	reference := fmt.Sprintf(`{"a":{%q:"key"}}`, protocol.SecretReferenceKey)
	member := func() plan.Member { return plan.Member{ID: db.NewID(), ParametersJSON: reference} }
	has, lacks, other, plain := member(), member(), member(), plan.Member{ID: db.NewID(), ParametersJSON: `{ "a": 1 }`}
	back := has
	has.Fallback = &back
	deliver := func(tx db.Tx, memberID string, s secret.Secret) {
		require.NoError(t, secret.Deliver(t.Context(), tx, secret.Delivery{
			MemberID: memberID, Parameter: "a", SecretID: s.ID, InstanceID: db.NewID(), NodeID: db.NewID(),
		}, []byte("for "+memberID)))
	}
	members := []plan.Member{has, lacks, plain}
	require.NoError(t, write(t, d, func(tx db.Tx) error {
		require.NoError(t, secret.Put(t.Context(), tx, of, []byte{}))
		require.NoError(t, secret.Put(t.Context(), tx, another, []byte{}))
		deliver(tx, has.ID, of)
		deliver(tx, other.ID, another)
		require.NoError(t, secret.Fill(t.Context(), tx, members))

		list, err := secret.Deliveries(t.Context(), tx, of.ID)
		require.NoError(t, err)
		require.Len(t, list, 1)
		require.Equal(t, has.ID, list[0].MemberID)
		return nil
	}))
	for _, m := range []plan.Member{members[0], *members[0].Fallback} {
		require.Equal(t, map[string][]byte{"a": []byte("for " + has.ID)}, protocol.SealedParameters(m.ParametersJSON))
		require.Len(t, m.SecretReferences, 1)
		require.Equal(t, uint64(7), m.SecretReferences[0].GetVersion())
	}
	require.Equal(t, reference, members[1].ParametersJSON, "nothing is sealed for it yet")
	require.Empty(t, members[1].SecretReferences)
	require.Equal(t, plain.ParametersJSON, members[2].ParametersJSON)
}

func TestAProjectHasAThousandSecretsAtMost(t *testing.T) {
	d := dbtest.New(t)
	s := newSecret("last")
	require.NoError(t, write(t, d, func(tx db.Tx) error {
		_, err := tx.Exec(t.Context(), `INSERT INTO runtime_secrets (id, org_id, project_id, name, version, sealed, status,
			resource_version, created_at, updated_at)
			SELECT gen_random_uuid(), $1, $2, 's' || n, 1, '', 'active', 1, $3, $3 FROM generate_series(1, 999) n`,
			s.OrgID, s.ProjectID, start())
		return err
	}))
	put := func(s secret.Secret) error {
		return write(t, d, func(tx db.Tx) error { return secret.Put(t.Context(), tx, s, []byte{}) })
	}
	require.NoError(t, put(s))
	more := newSecret("more")
	require.NoError(t, put(more), "of another project")
	more.ID, more.ProjectID = db.NewID(), s.ProjectID
	require.True(t, fault.Is(put(more), fault.Conflict))
	s.ResourceVersion++
	require.NoError(t, put(s), "one that it has")
}

// A node that holds a newer version than the rows know has one that the hub lost.
func TestASecretThatTheRowsDoNotKnowIsRevokedUntilItIsMadeAnew(t *testing.T) {
	d := dbtest.New(t)
	known := newSecret("key")
	known.Version = 3
	adopt := func(version int64, name string) (s secret.Secret, isKnown bool) {
		of := known
		of.ID, of.Name, of.Version, of.ResourceVersion, of.UpdatedAt = db.NewID(), name, version, 0, start().Add(time.Hour)
		require.NoError(t, write(t, d, func(tx db.Tx) (err error) {
			s, isKnown, err = secret.Adopt(t.Context(), tx, of)
			return err
		}))
		return s, isKnown
	}
	require.NoError(t, write(t, d, func(tx db.Tx) error { return secret.Put(t.Context(), tx, known, []byte("v")) }))
	for _, version := range []int64{2, 3} {
		s, isKnown := adopt(version, "key")
		require.True(t, isKnown)
		require.Equal(t, known.Version, s.Version)
		require.Equal(t, secret.StatusActive, s.Status)
	}
	s, isKnown := adopt(4, "key")
	require.False(t, isKnown)
	require.Equal(t, known.ID, s.ID)
	require.Equal(t, int64(4), s.Version)
	require.Equal(t, secret.StatusRevoked, s.Status)
	s, isKnown = adopt(1, "unheard-of")
	require.False(t, isKnown)
	require.Equal(t, secret.StatusRevoked, s.Status)

	require.NoError(t, write(t, d, func(tx db.Tx) error {
		_, err := tx.Exec(t.Context(), `INSERT INTO runtime_secrets (id, org_id, project_id, name, version, sealed, status,
			resource_version, created_at, updated_at) SELECT gen_random_uuid(), $1, $2, 'n' || n::TEXT, 1, '', 'active', 1,
			$3, $3 FROM generate_series(1, 1000) AS n`, known.OrgID, known.ProjectID, start())
		return err
	}))
	_, isKnown = adopt(1, "beyond the bound")
	require.False(t, isKnown, "a full project keeps no node from its resync")
}

func TestAnIdentityIsDueFromItsTimeOn(t *testing.T) {
	d := dbtest.New(t)
	var all []secret.Identity
	for i := range 3 {
		all = append(all, secret.Identity{
			MemberID: fmt.Sprintf("00000000-0000-4000-8000-00000000000%d", i), InstanceID: db.NewID(), OrgID: db.NewID(),
			ProjectID: db.NewID(), NodeID: db.NewID(), RenewAt: start(),
		})
	}
	all[2].RenewAt = start().Add(time.Second)
	require.NoError(t, write(t, d, func(tx db.Tx) error {
		for _, i := range all {
			require.NoError(t, secret.PutIdentity(t.Context(), tx, i, []byte("sealed")))
		}
		return nil
	}))
	due := func(after string, now time.Time, limit int) (ids []string) {
		require.NoError(t, write(t, d, func(tx db.Tx) error {
			list, err := secret.DueIdentities(t.Context(), tx, after, now, limit)
			ids = nil
			for _, i := range list {
				ids = append(ids, i.MemberID)
			}
			return err
		}))
		return ids
	}
	require.Empty(t, due("", start().Add(-time.Second), 10))
	require.Equal(t, []string{all[0].MemberID, all[1].MemberID}, due("", start(), 10))
	require.Equal(t, []string{all[0].MemberID}, due("", start(), 1))
	require.Equal(t, []string{all[1].MemberID}, due(all[0].MemberID, start(), 10), "the page after it")
	for i, want := range []bool{true, true, false} {
		require.NoError(t, write(t, d, func(tx db.Tx) error {
			got, err := secret.IsIdentityDue(t.Context(), tx, all[i].MemberID, start())
			require.Equal(t, want, got)
			return err
		}))
	}
}

// Write access to the database is not enough to restore an earlier value of a secret, such as one that was revoked.
func TestASealedValueIsOfOneVersionOfItsSecret(t *testing.T) {
	kek, err := secret.NewKEK([]byte("0123456789abcdef0123456789abcdef"))
	require.NoError(t, err)
	sealer, s := secret.NewSealer(kek), newSecret("key")
	sealed, err := sealer.Seal([]byte("old"), s.AAD())
	require.NoError(t, err)
	_, err = sealer.Open(sealed, s.AAD())
	require.NoError(t, err)
	next, other := s, newSecret("key")
	next.Version++
	for _, of := range []secret.Secret{next, other} {
		_, err := sealer.Open(sealed, of.AAD())
		require.Error(t, err)
	}
}
