package cli_test

import (
	"encoding/json"
	"net/http"
	"slices"
	"strings"

	"github.com/gpuaas/gpuaas/pkg/client"
)

const (
	volumeID     = "0192f0c0-0000-7000-8000-000000000020"
	snapshotID   = "0192f0c0-0000-7000-8000-000000000021"
	secretID     = "0192f0c0-0000-7000-8000-000000000022"
	credentialID = "0192f0c0-0000-7000-8000-000000000023"
)

// storage is what a project of the fakeHub keeps.
type storage struct {
	volume   client.Volume
	snapshot client.VolumeSnapshot
	secret   client.Secret
	// value is the secret's, which no answer has.
	value string
	// unwrapped says that the wrapping token is used.
	unwrapped bool
	index     client.PackageIndexPut
	removed   []string
}

func decode[T any](r *http.Request) (body T) {
	_ = json.NewDecoder(r.Body).Decode(&body)
	return body
}

// serveVolumes answers for volumes and their snapshots; each becomes what was asked for when it is waited for.
func (s *storage) serveVolumes(w http.ResponseWriter, r *http.Request, route string) bool {
	const all = "/projects/" + projectID + "/volumes"
	const one = all + "/" + volumeID
	v := &s.volume
	switch route {
	case "POST " + all:
		body := decode[client.VolumeCreate](r)
		*v = client.Volume{
			ID: volumeID, Name: body.Name, SizeMib: body.SizeMib, NodeID: nodeID, Status: client.VolumeStatusPending,
			Detail: "reserving its space",
		}
		answer(w, 201, v)
	case "GET " + all:
		answer(w, 200, client.VolumeList{Items: []client.Volume{*v}})
	case "GET " + one:
		if r.URL.Query().Get("wait") != "" {
			v.Status = map[client.VolumeStatus]client.VolumeStatus{
				client.VolumeStatusDeleting: client.VolumeStatusDeleted,
			}[v.Status]
			if v.Status == "" {
				v.Status = client.VolumeStatusReady
			}
			switch v.Name {
			case "doomed":
				v.Status = client.VolumeStatusNodeLost
			case "short-lived":
				v.Status = client.VolumeStatusDeleted
			}
		}
		answer(w, 200, v)
	case "PATCH " + one:
		v.SizeMib, v.Status = decode[client.VolumeResize](r).SizeMib, client.VolumeStatusPending
		answer(w, 200, v)
	case "DELETE " + one:
		v.Status = client.VolumeStatusDeleting
		answer(w, 202, v)
	case "POST " + one + "/restore":
		v.StatusReason = "restored from " + decode[client.VolumeRestore](r).SnapshotID
		answer(w, 202, v)
	default:
		return s.serveSnapshots(w, r, strings.ReplaceAll(route, one+"/snapshots", "SNAPSHOTS"))
	}
	return true
}

func (s *storage) serveSnapshots(w http.ResponseWriter, r *http.Request, route string) bool {
	switch route {
	case "POST SNAPSHOTS":
		s.snapshot = client.VolumeSnapshot{
			ID: snapshotID, Status: client.VolumeSnapshotStatusPending,
			Description: decode[client.VolumeSnapshotCreate](r).Description,
		}
		answer(w, 201, s.snapshot)
	case "GET SNAPSHOTS":
		answer(w, 200, client.VolumeSnapshotList{Items: []client.VolumeSnapshot{s.snapshot}})
	case "GET SNAPSHOTS/" + snapshotID:
		s.snapshot.Status = client.VolumeSnapshotStatusReady
		answer(w, 200, s.snapshot)
	case "DELETE SNAPSHOTS/" + snapshotID:
		s.snapshot.Status = client.VolumeSnapshotStatusDeleting
		answer(w, 202, s.snapshot)
	default:
		return false
	}
	return true
}

// serveSecrets answers for secrets and access credentials. A wrapping token is good once.
func (s *storage) serveSecrets(w http.ResponseWriter, r *http.Request, route string) bool {
	const secrets = "/projects/" + projectID + "/secrets"
	const credentials = "/projects/" + projectID + "/access-credentials"
	switch route {
	case "POST " + secrets:
		body := decode[client.SecretCreate](r)
		s.value = body.Value
		s.secret = client.Secret{ID: secretID, Name: body.Name, Version: 1, Status: client.SecretStatusActive}
		answer(w, 201, s.secret)
	case "GET " + secrets:
		answer(w, 200, client.SecretList{Items: []client.Secret{s.secret}})
	case "GET " + secrets + "/" + secretID:
		answer(w, 200, s.secret)
	case "POST " + secrets + "/" + secretID + "/rotate":
		if value := decode[client.SecretRotate](r).Value; value != s.value {
			s.value, s.secret.Version = value, s.secret.Version+1
		}
		answer(w, 200, s.secret)
	case "POST " + secrets + "/" + secretID + "/revoke":
		s.secret.Status = client.SecretStatusRevoked
		answer(w, 200, s.secret)
	case "GET " + credentials:
		ended := credential(client.AccessCredentialStatusRevoked, 1)
		ended.ID = orgID
		answer(w, 200, client.AccessCredentialList{Items: []client.AccessCredential{
			ended, credential(client.AccessCredentialStatusActive, 1),
		}})
	case "GET " + credentials + "/" + credentialID:
		answer(w, 200, credential(client.AccessCredentialStatusActive, 1))
	case "POST " + credentials, "POST " + credentials + "/" + credentialID + "/rotate":
		s.unwrapped = false
		made := credential(client.AccessCredentialStatusActive, 2)
		made.WrappingToken.Token = "wrapped"
		answer(w, 201, made)
	case "POST " + credentials + "/" + credentialID + "/revoke":
		answer(w, 200, credential(client.AccessCredentialStatusRevoked, 1))
	case "POST /auth/unwrap":
		if s.unwrapped || decode[client.Unwrap](r).Token != "wrapped" {
			refuse(w, r, http.StatusNotFound, "wrapping_token_invalid", "The wrapping token is used.")
			return true
		}
		s.unwrapped = true
		answer(w, 200, client.Unwrapped{AccessCredentialID: credentialID, PrivateKeyPem: testKey})
	default:
		return false
	}
	return true
}

func credential(status client.AccessCredentialStatus, version int64) client.AccessCredential {
	return client.AccessCredential{
		ID: credentialID, Name: "laptop", Kind: "ssh_key", Status: status, Version: version,
		PublicKey: "ssh-ed25519 AAAA",
	}
}

// serveEnvironments answers for the Python packages of a project: two nodes keep the same environment.
func (s *storage) serveEnvironments(w http.ResponseWriter, r *http.Request, route string) bool {
	const project = "/projects/" + projectID
	switch {
	case route == "GET "+project+"/environments":
		kept := []client.Environment{
			{Digest: "sha256:a", NodeID: nodeID, SizeBytes: 7 << 20, Requirements: []string{"numpy==2.1.0"}},
			{Digest: "sha256:a", NodeID: orgID, UsedBy: []client.ID{instanceID}},
			{Digest: "sha256:b", NodeID: orgID},
			{Digest: "sha256:d", NodeID: nodeID, UsedBy: []client.ID{instanceID}},
		}
		if !slices.ContainsFunc(s.removed, func(gone string) bool { return strings.Contains(gone, "sha256:d") }) {
			kept = append(kept, client.Environment{Digest: "sha256:d", NodeID: userID})
		}
		answer(w, 200, client.EnvironmentList{Items: kept})
	case strings.HasPrefix(route, "DELETE "+project+"/environments/sha256:d") && strings.HasSuffix(route, nodeID):
		refuse(w, r, http.StatusConflict, "environment_in_use", "An app instance uses it.")
	case strings.HasPrefix(route, "DELETE "+project+"/environments/"):
		s.removed = append(s.removed, route)
		w.WriteHeader(http.StatusNoContent)
	case route == "PUT "+project+"/package-index":
		s.index = decode[client.PackageIndexPut](r)
		answer(w, 200, client.PackageIndex{URL: s.index.URL, Username: s.index.Username + "/" + s.index.Password})
	case route == "GET "+project+"/package-index" && s.index.URL != "":
		answer(w, 200, client.PackageIndex{URL: s.index.URL, OwnCa: s.index.CaPem != ""})
	case route == "DELETE "+project+"/package-index":
		s.index = client.PackageIndexPut{}
		w.WriteHeader(http.StatusNoContent)
	default:
		return false
	}
	return true
}

// serveFleet answers a platform admin.
func serveFleet(w http.ResponseWriter, r *http.Request, route string) bool {
	token := client.JoinToken{ID: tokenID, Status: "open", RootFingerprint: "SHA256:root"}
	switch route {
	case "GET /admin/nodes/" + nodeID:
		answer(w, 200, client.Node{ID: nodeID, Hostname: "rack-1", Accelerators: []client.NodeAccelerator{
			{
				ID: "GPU-a", Model: "H100", Health: "degraded", HealthReason: "too hot", NumaNode: 1,
				Links: []client.AcceleratorLink{
					{Count: 4, Kind: "nvlink", PeerID: "GPU-b"}, {Count: 2, Kind: "nvswitch"},
				},
				Partitions: []client.AcceleratorPartition{{Profile: "1g.10gb", ID: "MIG-a"}},
			},
			{ID: "GPU-b", NumaNode: -1},
		}})
	case "POST /admin/join-tokens":
		token.Token, token.Description = "join-me", decode[client.JoinTokenCreate](r).Description
		answer(w, 201, token)
	case "GET /admin/join-tokens":
		answer(w, 200, client.JoinTokenList{Items: []client.JoinToken{token}})
	case "GET /admin/recovery":
		answer(w, 200, client.Recovery{
			Waiting: []client.RecoveringNode{{NodeID: nodeID, Hostname: "rack-1", State: "waiting"}},
			Findings: []client.RecoveryFinding{{
				Kind: "state_unverified", ResourceType: "node", ResourceID: nodeID, Detail: "x",
			}},
		})
	default:
		return false
	}
	return true
}
