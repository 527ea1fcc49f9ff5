package uplink

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/url"
	"strings"
	"sync"
	"time"

	"github.com/gpuaas/gpuaas/agent/internal/accept"
	"github.com/gpuaas/gpuaas/agent/internal/state"
	"github.com/gpuaas/gpuaas/pkg/client"
	"github.com/gpuaas/gpuaas/pkg/failpoint"
	"github.com/gpuaas/gpuaas/pkg/fault"
	"github.com/gpuaas/gpuaas/pkg/loop"
	"github.com/gpuaas/gpuaas/protocol"
	"github.com/gpuaas/gpuaas/protocol/link"
)

const (
	// apiTimeout bounds one call of the hub's API.
	apiTimeout = 20 * time.Second
	// maxAnswerBytes bounds its answer.
	maxAnswerBytes = 2 << 20
	// renewRetryMin and renewRetryMax bound the pause between attempts to renew, renewExpiredRetryMax the pause once the
	// certificate has expired: the node has no session then (law 13).
	renewRetryMin        = 10 * time.Second
	renewRetryMax        = 10 * time.Minute
	renewExpiredRetryMax = time.Minute
)

// Enrollment is what an operator gives a new node.
type Enrollment struct {
	APIURL string
	// RootFingerprint pins the root: a key's fingerprint or the root role's digest (protocol.VerifyBundle).
	RootFingerprint string
	JoinToken       string
	Hostname        string
}

// Enroll joins the mesh: it gets the trust bundle, verifies it by the pinned root, and only then sends the join token.
// The hub gives the same node id for the same token and key, so Enroll can be repeated after a lost answer.
func Enroll(ctx context.Context, e Enrollment, creds *Credentials, store *state.Store, clock *state.Clock) error {
	if err := e.check(); err != nil {
		return err
	}
	bundle, err := fetchBundle(ctx, e.APIURL, e.RootFingerprint)
	if err != nil {
		return err
	}
	if err := store.InitBundle(bundle); err != nil {
		return fault.New(fault.Conflict, codeTrustBundleConflict,
			"The data directory holds a trust bundle that the hub's does not continue. Give this agent an empty data directory.",
			err).Permanent()
	}
	failpoint.Hit("agent/enroll/bundle_stored")
	clock.Passed(bundle.Message().GetIssuedAt().AsTime())
	csr, err := creds.request(e.Hostname)
	if err != nil {
		return err
	}
	answer, err := call[client.NodeCredentials](ctx, e.APIURL, hubTLS(store, clock, nil),
		func(ctx context.Context, hub *client.Client) (*http.Response, error) {
			return hub.EnrollNode(ctx, client.NodeEnroll{JoinToken: e.JoinToken, CsrPem: csr, Hostname: e.Hostname})
		})
	if err != nil {
		return err
	}
	failpoint.Hit("agent/enroll/answered")
	id := Identity{
		NodeID: answer.NodeID, HubID: answer.HubID, APIURL: e.APIURL, SessionAddr: answer.SessionAddr,
		RegistryHost: answer.RegistryHost, RootFingerprint: e.RootFingerprint,
	}
	_, err = creds.save(id, chainOf(answer))
	return err
}

func (e Enrollment) check() error {
	missing := func(what, flag string) error {
		return fault.New(fault.Malformed, codeEnrollmentIncomplete, fmt.Sprintf("This node is not enrolled and has no %s. "+
			"Give it with %s.", what, flag), nil).Permanent()
	}
	switch {
	case e.APIURL == "":
		return missing("address of a hub", "--api-url")
	case !strings.HasPrefix(e.APIURL, "https://"):
		return fault.New(fault.Malformed, codeAPIURLInvalid, "The hub's address must begin with https://.", nil).Permanent()
	case e.RootFingerprint == "":
		return missing("root fingerprint", "--root-fingerprint")
	case e.JoinToken == "":
		return missing("join token", "--join-token-file")
	}
	if _, err := protocol.NormalizePin(e.RootFingerprint); err != nil {
		return fault.New(fault.Malformed, codeRootFingerprintInvalid, fmt.Sprintf(
			"The root fingerprint must be %s or %s followed by 64 hex digits, as `gpuaas-hub trust show` prints it.",
			protocol.FingerprintPrefix, protocol.RootRolePrefix), err).Permanent()
	}
	return nil
}

// fetchUnverified gets a trust bundle on a connection that is not authenticated. The caller verifies its signature.
func fetchUnverified(ctx context.Context, base string) (*protocol.Envelope, error) {
	//nolint:gosec // the bundle's signature is verified, and nothing secret is sent
	unverified := &tls.Config{MinVersion: tls.VersionTLS13, InsecureSkipVerify: true}
	raw, err := call[json.RawMessage](ctx, base, unverified,
		func(ctx context.Context, hub *client.Client) (*http.Response, error) { return hub.GetTrustBundle(ctx) })
	if err != nil {
		return nil, err
	}
	env, err := protocol.EnvelopeFromJSON(raw)
	if err != nil {
		return nil, fault.New(fault.Malformed, codeTrustBundleInvalid, "What answers at "+base+
			" shows no trust bundle.", err).Permanent()
	}
	return env, nil
}

// fetchBundle gets the trust bundle and verifies it by the pinned root.
func fetchBundle(ctx context.Context, base, fingerprint string) (protocol.Bundle, error) {
	env, err := fetchUnverified(ctx, base)
	if err != nil {
		return protocol.Bundle{}, err
	}
	b, err := protocol.VerifyBundle(env, fingerprint)
	if err != nil {
		return protocol.Bundle{}, fault.New(fault.Forbidden, accept.CodeRootFingerprintMismatch, fmt.Sprintf(
			"The hub at %s is not rooted in %s. Compare the fingerprint with the one that `gpuaas-hub trust show` prints; if "+
				"it is right, something else answers at that address.",
			base, fingerprint), err).Permanent()
	}
	return b, nil
}

// refetchBundle replaces a stored trust bundle that does not verify by the hub's, verified as at enrollment.
func (u *Uplink) refetchBundle(ctx context.Context) error {
	bundle, err := fetchBundle(ctx, u.apiURL(), u.creds.Identity().RootFingerprint)
	if err != nil {
		return err
	}
	u.log.WarnContext(ctx, "the stored trust bundle did not verify; the hub's, which the pinned root signed, replaces it",
		slog.Uint64("bundle_version", bundle.Version()))
	return u.store.InitBundle(bundle)
}

// followBundle accepts the next trust bundle where no authority of the stored one vouches for the hub: it was replaced
// while the node was away, and no session can carry the bundle. The root of the stored one must have signed the next.
func (u *Uplink) followBundle(ctx context.Context) {
	env, err := fetchUnverified(ctx, u.apiURL())
	if err == nil {
		err = u.store.AcceptBundle(env)
	}
	if err != nil {
		u.log.WarnContext(ctx, "what answers at the hub's address belongs to another mesh, or cannot be asked for the "+
			"bundle that names its authority", slog.Any("error", err))
	}
}

// hubTLS verifies a hub by its SPIFFE id under the current trust bundle, not by a host name. own is the certificate to
// show; nil shows none.
func hubTLS(store *state.Store, clock *state.Clock, own link.Certificate) *tls.Config {
	peer := hubPeer(store, clock)
	conf := &tls.Config{
		MinVersion: tls.VersionTLS13,
		Time:       clock.Now,
		//nolint:gosec // VerifyConnection checks chain, validity and identity; Go's own check needs a host name
		InsecureSkipVerify: true,
		VerifyConnection: func(state tls.ConnectionState) error {
			p := peer
			p.TrustDomain = store.Bundle().TrustDomain()
			_, err := p.Verify(state.PeerCertificates, x509.ExtKeyUsageServerAuth)
			return err
		},
	}
	if own != nil {
		conf.GetClientCertificate = func(*tls.CertificateRequestInfo) (*tls.Certificate, error) { return own() }
	}
	return conf
}

func hubPeer(store *state.Store, clock *state.Clock) link.Peer {
	return link.Peer{
		Roots:       func() *x509.CertPool { return store.Bundle().HubCAs() },
		TrustDomain: store.Bundle().TrustDomain(), Kind: protocol.KindHub, Now: clock.Now,
		Earliest: clock.Earliest, Behind: func() bool { return !clock.Trusted() },
	}
}

// call sends one request to the hub's API, on a connection of its own, and decodes the answer. It does not retry.
func call[T any](ctx context.Context, base string, conf *tls.Config,
	send func(context.Context, *client.Client) (*http.Response, error),
) (answer T, err error) {
	ctx, cancel := context.WithTimeout(ctx, apiTimeout)
	defer cancel()
	transport := &http.Transport{TLSClientConfig: conf, Proxy: http.ProxyFromEnvironment, ForceAttemptHTTP2: true}
	defer transport.CloseIdleConnections()
	resp, err := send(ctx, &client.Client{
		Server: strings.TrimSuffix(base, "/") + "/api/v1/", Client: &http.Client{Transport: transport},
	})
	if err != nil {
		return answer, unreachable(base, err)
	}
	raw, err := io.ReadAll(io.LimitReader(resp.Body, maxAnswerBytes))
	err = errors.Join(err, resp.Body.Close())
	switch {
	case err != nil:
		return answer, unreachable(base, err)
	case resp.StatusCode >= http.StatusBadRequest:
		return answer, problem(resp.StatusCode, raw)
	}
	if err := json.Unmarshal(raw, &answer); err != nil {
		return answer, fault.New(fault.Internal, codeHubAnswerInvalid, "What answers at "+base+" is not a hub.", err)
	}
	return answer, nil
}

// unreachable says why a request got no answer.
func unreachable(base string, err error) error {
	_, unknown := errors.AsType[x509.UnknownAuthorityError](err)
	invalid, is := errors.AsType[x509.CertificateInvalidError](err)
	address, bad := errors.AsType[*url.Error](err)
	switch {
	case bad && address.Op == "parse":
		return fault.New(fault.Malformed, codeAPIURLInvalid, "The hub's address "+base+" is not a URL.", err).Permanent()
	case is && invalid.Reason == x509.Expired:
		return fault.New(fault.Unavailable, codeHubCertificateExpired,
			"The hub's certificate is not valid at this machine's time. Set the clock (and see that it keeps time), then try "+
				"again.", err)
	case unknown:
		return fault.New(fault.Unavailable, codeHubNotTrusted, "What answers at "+base+" does not belong to this mesh.", err)
	}
	return fault.New(fault.Unavailable, codeHubUnreachable, "The hub at "+base+" does not answer. Check the address, "+
		"and that this machine may reach it.", err)
}

// problem converts an error answer of the hub (RFC 9457) into a fault. It is permanent where a repeated call would get
// the same answer.
func problem(status int, raw []byte) error {
	var p client.Problem
	kind := fault.Unavailable
	switch {
	case status == http.StatusUnauthorized:
		kind = fault.Unauthenticated
	case status == http.StatusForbidden:
		kind = fault.Forbidden
	case status == http.StatusTooManyRequests:
		kind = fault.RateLimited
	case status < http.StatusInternalServerError:
		kind = fault.Conflict
	}
	var f *fault.Error
	if err := json.Unmarshal(raw, &p); err != nil || p.Code == "" {
		f = fault.New(kind, codeHubError, fmt.Sprintf("The hub answered with HTTP status %d.", status), nil)
	} else {
		f = fault.New(kind, fault.Code(p.Code), p.Detail, nil)
	}
	if status < http.StatusInternalServerError && status != http.StatusTooManyRequests {
		return f.Permanent()
	}
	return f
}

// chainOf is the node's certificate and those of its issuers, in PEM.
func chainOf(n client.NodeCredentials) []byte {
	return []byte(strings.Join(append([]string{strings.TrimSpace(n.CertificatePem)}, n.Chain...), "\n"))
}

// renewer renews the node's certificate before it expires.
type renewer struct {
	creds  *Credentials
	store  *state.Store
	clock  *state.Clock
	apiURL string
	log    *slog.Logger

	renewing sync.Mutex
}

// dueIn is the time until half of the certificate's life is over.
func (r *renewer) dueIn() time.Duration {
	cert, err := r.creds.Certificate()
	if err != nil {
		return 0
	}
	half := cert.Leaf.NotBefore.Add(cert.Leaf.NotAfter.Sub(cert.Leaf.NotBefore) / 2)
	return max(half.Sub(r.clock.Now()), 0)
}

// run renews at half-life until ctx ends, also after expiry: the hub checks the node's key, not the certificate.
func (r *renewer) run(ctx context.Context) {
	retry := renewRetryMin
	// By a clock that is behind, an expired certificate seems valid: renew once at the start.
	doubtful := !r.clock.Trusted()
	for {
		wait := min(r.dueIn(), time.Hour) // the clock may be set meanwhile
		if wait == 0 || doubtful {
			old, _ := r.creds.Certificate() // nil if there is none
			if err := r.renew(ctx, old); err == nil {
				retry, doubtful = renewRetryMin, false
				// By a wrong clock of the node, a new certificate may be past its half-life: do not renew in a loop.
				wait = max(min(r.dueIn(), time.Hour), renewRetryMin)
			} else {
				if ctx.Err() == nil {
					r.log.WarnContext(ctx, "cannot renew the certificate", slog.Any("error", err),
						slog.String("retry_in", retry.String()))
				}
				retry, wait = r.afterFailure(retry)
			}
		}
		if !loop.Pause(ctx, wait) {
			return
		}
	}
}

// afterFailure returns the next value of retry and the pause before the next attempt.
func (r *renewer) afterFailure(retry time.Duration) (next, wait time.Duration) {
	left := time.Duration(0)
	if cert, err := r.creds.Certificate(); err == nil {
		left = max(cert.Leaf.NotAfter.Sub(r.clock.Now()), 0)
	}
	// A pause that begins before the certificate expires ends soon after.
	return min(2*retry, renewRetryMax), jitter(min(retry, left+renewExpiredRetryMax))
}

// renew replaces the certificate old, unless another goroutine has done it.
func (r *renewer) renew(ctx context.Context, old *tls.Certificate) error {
	r.renewing.Lock()
	defer r.renewing.Unlock()
	if cert, err := r.creds.Certificate(); err == nil && cert != old {
		return nil
	}
	id := r.creds.Identity()
	csr, err := r.creds.request(id.NodeID)
	if err != nil {
		return err
	}
	issued := r.clock.Now().Format(time.RFC3339)
	signature, err := r.creds.Signer().Sign([]byte(id.NodeID + "\n" + csr + "\n" + issued))
	if err != nil {
		return err
	}
	answer, err := r.ask(ctx, client.NodeRenew{
		NodeID: id.NodeID, CsrPem: csr, IssuedAt: issued, Signature: base64.StdEncoding.EncodeToString(signature),
	})
	if err != nil {
		return err
	}
	id.SessionAddr, id.RegistryHost, id.APIURL = answer.SessionAddr, answer.RegistryHost, r.apiURL
	unsaved, err := r.creds.save(id, chainOf(answer))
	if err != nil {
		return err
	}
	if unsaved != nil {
		r.log.WarnContext(ctx, "the renewed certificate counts, and cannot be stored", slog.Any("error", unsaved))
	}
	cert, err := r.creds.Certificate()
	if err == nil {
		r.log.InfoContext(ctx, "certificate renewed", slog.Time("expires_at", cert.Leaf.NotAfter))
	}
	return err
}

// ask requests the renewal. It first shows the certificate: the hub then applies the node's own rate limit and not the
// one of its address. If the hub no longer accepts the certificate, ask connects without it.
func (r *renewer) ask(ctx context.Context, body client.NodeRenew) (client.NodeCredentials, error) {
	renew := func(ctx context.Context, hub *client.Client) (*http.Response, error) { return hub.RenewNode(ctx, body) }
	if cert, err := r.creds.Certificate(); err == nil && r.clock.Now().Before(cert.Leaf.NotAfter) {
		shown := hubTLS(r.store, r.clock, r.creds.Certificate)
		answer, err := call[client.NodeCredentials](ctx, r.apiURL, shown, renew)
		if !fault.Is(err, fault.Unavailable) {
			return answer, err
		}
	}
	return call[client.NodeCredentials](ctx, r.apiURL, hubTLS(r.store, r.clock, nil), renew)
}
