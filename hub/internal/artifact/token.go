package artifact

import (
	"context"
	"crypto/ed25519"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"time"

	"github.com/distribution/reference"
	"github.com/golang-jwt/jwt/v5"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/gpuaas/gpuaas/pkg/fault"
	"github.com/gpuaas/gpuaas/protocol"
)

const (
	// TokenPath is where clients exchange a credential for a token (the realm of the challenge).
	TokenPath = "/v2/token"
	// tokenLifetime bounds one token; clients fetch the next one by themselves. An upload that lasts longer continues,
	// because the token is checked when a request starts.
	tokenLifetime = 5 * time.Minute
	// nodeCredentialLifetime bounds how long a node may pull with one credential.
	nodeCredentialLifetime = 15 * time.Minute
	// maxScopes bounds one token request; the rest is ignored. Clients name the repository, and one to mount blobs from;
	// each costs two statements.
	maxScopes = 4
	// maxTokenFormBytes bounds the body of a token request.
	maxTokenFormBytes = 16 << 10

	issuer = "gpuaas-hub"
	// The audiences differ, so that a credential is not accepted as a token, nor either elsewhere under the same key.
	audienceCredential = "gpuaas-registry-credential" //nolint:gosec // an audience, not a credential
	audienceAccess     = "gpuaas-registry"

	actionPull = "pull"
	actionPush = "push"

	subjectIntent = "intent-"
	subjectNode   = "node-"
)

// grant is what a token allows on one repository.
type grant struct {
	Repository string   `json:"repository"`
	Actions    []string `json:"actions"`
}

// claims are those of credentials (one grant, long) and of access tokens (some grants, short).
type claims struct {
	jwt.RegisteredClaims
	Grants []grant `json:"grants"`
	// NodeID binds the token to the connections on which this node has shown its certificate.
	NodeID string `json:"node_id,omitempty"`
}

// issuerOfTokens signs and verifies credentials and tokens.
type issuerOfTokens struct {
	key ed25519.PrivateKey
	now func() time.Time
}

func (i issuerOfTokens) sign(audience, subject, nodeID string, grants []grant, expiresAt time.Time) (string, error) {
	now := i.now()
	return jwt.NewWithClaims(jwt.SigningMethodEdDSA, claims{
		RegisteredClaims: jwt.RegisteredClaims{
			Issuer: issuer, Subject: subject, Audience: jwt.ClaimStrings{audience},
			IssuedAt: jwt.NewNumericDate(now), ExpiresAt: jwt.NewNumericDate(expiresAt),
		},
		Grants: grants, NodeID: nodeID,
	}).SignedString(i.key)
}

func (i issuerOfTokens) read(audience, token string) (claims, error) {
	var c claims
	_, err := jwt.ParseWithClaims(token, &c, func(*jwt.Token) (any, error) { return i.key.Public(), nil },
		jwt.WithValidMethods([]string{jwt.SigningMethodEdDSA.Alg()}), jwt.WithIssuer(issuer), jwt.WithAudience(audience),
		jwt.WithExpirationRequired(), jwt.WithTimeFunc(i.now))
	return c, err
}

// IntentCredential returns the user name and password that may push to the intent's repository, and no other, until the
// intent ends. The password is a secret: show it once.
func (r *Registry) IntentCredential(i Intent) (username, password string, err error) {
	username = subjectIntent + i.ID
	password, err = r.tokens.sign(audienceCredential, username, "",
		[]grant{{i.Repository, []string{actionPull, actionPush}}}, i.ExpiresAt)
	return username, password, err
}

// NodeCredential lets a node pull one repository for a short while, on connections that show the node's certificate
// only. The caller has checked that the node needs the repository.
func (r *Registry) NodeCredential(nodeID, repository string, now time.Time) (*protocol.PullCredential, error) {
	username, expiresAt := subjectNode+nodeID, now.Add(nodeCredentialLifetime)
	password, err := r.tokens.sign(audienceCredential, username, nodeID, []grant{{repository, []string{actionPull}}},
		expiresAt)
	if err != nil {
		return nil, fmt.Errorf("sign a pull credential: %w", err)
	}
	return &protocol.PullCredential{
		RegistryHost: r.conf.Host, Username: username, Password: password,
		ExpiresAt: timestamppb.New(expiresAt),
	}, nil
}

// tokenRequest is one of the two forms: GET with basic authentication (the distribution specification), or POST
// (OAuth2).
type tokenRequest struct {
	username, password string
	wanted             []grant
}

func readTokenRequest(w http.ResponseWriter, r *http.Request) (tokenRequest, error) {
	var t tokenRequest
	r.Body = http.MaxBytesReader(w, r.Body, maxTokenFormBytes)
	if err := r.ParseForm(); err != nil {
		return t, fault.New(fault.Malformed, codeTokenRequestMalformed, "The token request cannot be read.", err).Permanent()
	}
	if r.Method == http.MethodPost {
		if r.PostForm.Get("grant_type") != "password" {
			return t, fault.New(fault.Malformed, codeTokenRequestMalformed, "Only the grant type password is offered.",
				nil).Permanent()
		}
		t.username, t.password = r.PostForm.Get("username"), r.PostForm.Get("password")
	} else {
		t.username, t.password, _ = r.BasicAuth()
	}
	for scope := range strings.FieldsSeq(strings.Join(r.Form["scope"], " ")) {
		kind, rest, _ := strings.Cut(scope, ":")
		at := strings.LastIndexByte(rest, ':')
		if kind != "repository" || at < 0 || len(t.wanted) == maxScopes {
			continue
		}
		if _, err := reference.WithName(rest[:at]); err != nil {
			continue // no repository has this name
		}
		t.wanted = append(t.wanted, grant{rest[:at], strings.Split(rest[at+1:], ",")})
	}
	return t, nil
}

func (r *Registry) serveToken(w http.ResponseWriter, req *http.Request) {
	if req.Method != http.MethodGet && req.Method != http.MethodPost {
		w.Header().Set("Allow", "GET, POST")
		writeError(w, http.StatusMethodNotAllowed, "UNSUPPORTED", "use GET or POST")
		return
	}
	t, err := readTokenRequest(w, req)
	if err != nil {
		writeError(w, http.StatusBadRequest, "DENIED", fault.As(err).Public)
		return
	}
	subject, nodeID, grants, err := r.allowed(req.Context(), req.TLS, t)
	if err != nil {
		f := fault.As(err)
		if f.Kind == fault.Internal || f.Kind == fault.Unavailable {
			r.log.ErrorContext(req.Context(), "registry token", "error", err)
			writeError(w, http.StatusServiceUnavailable, "UNAVAILABLE", "try again in a moment")
			return
		}
		w.Header().Set("WWW-Authenticate", `Basic realm="gpuaas registry"`)
		writeError(w, http.StatusUnauthorized, "UNAUTHORIZED", f.Public)
		return
	}
	now := r.tokens.now()
	token, err := r.tokens.sign(audienceAccess, subject, nodeID, grants, now.Add(tokenLifetime))
	if err != nil {
		r.log.ErrorContext(req.Context(), "sign a registry token", "error", err)
		writeError(w, http.StatusInternalServerError, "UNKNOWN", "could not make a token")
		return
	}
	writeJSON(w, http.StatusOK, map[string]any{
		"token": token, "access_token": token, "expires_in": int(tokenLifetime.Seconds()),
		"issued_at": now.UTC().Format(time.RFC3339),
	})
}

var errCredential = errors.New("the credential was not issued by this registry, or has expired")

// allowed returns the wanted grants that the credential has. Wanting more is no error (distribution token
// specification).
func (r *Registry) allowed(ctx context.Context, conn *tls.ConnectionState,
	t tokenRequest,
) (subject, nodeID string, grants []grant, err error) {
	refused := func(cause error) error {
		return fault.New(fault.Unauthenticated, fault.CodeCredentialInvalid, "The registry does not accept this credential.",
			cause).Permanent()
	}
	if t.username == "" || t.password == "" {
		return "", "", nil, refused(errors.New("no credential"))
	}
	intentID, isIntent := strings.CutPrefix(t.username, subjectIntent)
	isNode := strings.HasPrefix(t.username, subjectNode)
	if !isIntent && !isNode {
		return r.allowedToPull(ctx, t)
	}
	c, err := r.tokens.read(audienceCredential, t.password)
	if err != nil || c.Subject != t.username {
		return "", "", nil, refused(errors.Join(errCredential, err))
	}
	if isIntent {
		if err := r.conf.IntentOpen(ctx, intentID); err != nil {
			return "", "", nil, err
		}
	}
	if c.NodeID != "" && !r.showsNode(conn, c.NodeID) {
		return "", "", nil, refused(errNotTheNode)
	}
	return c.Subject, c.NodeID, intersect(t.wanted, c.Grants), nil
}

// allowedToPull serves people and service accounts: the password is their access token of the API.
func (r *Registry) allowedToPull(ctx context.Context,
	t tokenRequest,
) (subject, nodeID string, grants []grant, err error) {
	subject, err = r.conf.Authenticate(ctx, t.password)
	if err != nil {
		return "", "", nil, err
	}
	for _, g := range t.wanted {
		if _, ok := OrgSlugOf(g.Repository); !ok || !slices.Contains(g.Actions, actionPull) {
			continue
		}
		switch err := r.conf.MayPull(ctx, t.password, g.Repository); {
		case err == nil:
			grants = append(grants, grant{g.Repository, []string{actionPull}})
		case fault.Is(err, fault.Internal) || fault.Is(err, fault.Unavailable):
			return "", "", nil, err
		}
	}
	return subject, "", grants, nil
}

func intersect(wanted, held []grant) []grant {
	var out []grant
	for _, w := range wanted {
		for _, h := range held {
			if w.Repository != h.Repository {
				continue
			}
			var actions []string
			for _, a := range h.Actions {
				if slices.Contains(w.Actions, a) {
					actions = append(actions, a)
				}
			}
			if len(actions) > 0 {
				out = append(out, grant{w.Repository, actions})
			}
		}
	}
	return out
}

// showsNode reports whether the TLS peer proved to be the node, and the node is not shut out. The server has verified
// the chain against the node authority; here only the name is compared.
func (r *Registry) showsNode(conn *tls.ConnectionState, nodeID string) bool {
	if conn == nil || len(conn.VerifiedChains) == 0 || len(conn.PeerCertificates) == 0 {
		return false
	}
	id, err := protocol.PeerID(conn.PeerCertificates[0], r.conf.TrustDomain, protocol.KindNode)
	return err == nil && id == nodeID && (r.conf.ShutOut == nil || !r.conf.ShutOut(nodeID))
}

func writeJSON(w http.ResponseWriter, status int, body any) {
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("Cache-Control", "no-store")
	w.WriteHeader(status)
	// The client has gone when this fails.
	_ = json.NewEncoder(w).Encode(body)
}

// writeError writes the error form of the distribution specification, which registry clients read.
func writeError(w http.ResponseWriter, status int, code, message string) {
	writeJSON(w, status, map[string]any{"errors": []map[string]string{{"code": code, "message": message}}})
}
