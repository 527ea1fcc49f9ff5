package command

import (
	"context"
	"encoding/json"
	"strings"
	"time"

	"github.com/gpuaas/gpuaas/hub/internal/access"
	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/iam"
	"github.com/gpuaas/gpuaas/hub/internal/oidc"
	"github.com/gpuaas/gpuaas/hub/internal/principal"
	"github.com/gpuaas/gpuaas/pkg/fault"
)

// actionExternal is audited, though no permission stands before it: the provider's word is the permission.
const actionExternal = "iam.identity.login"

// browserLoginLife is how long a person may take to log in at the provider.
const browserLoginLife = 10 * time.Minute

// IdentityProvider is an OpenID Connect provider.
type IdentityProvider struct {
	*oidc.Provider
	// OrgsOfDomains maps domains of verified e-mail addresses to the slugs of the orgs whose members have them.
	OrgsOfDomains map[string]string
}

// browserLogin and deviceLogin are the sealed secrets of logins under way.
type browserLogin struct{ Nonce, Verifier string }

type deviceLogin struct{ DeviceCode string }

// BrowserLogin is where a browser goes to log in.
type BrowserLogin struct {
	State, URL string
	ExpiresAt  time.Time
}

// DeviceLogin is what a person needs to confirm a login on another device.
type DeviceLogin struct {
	Handle string
	oidc.Device
	ExpiresAt time.Time
}

func (s *Service) identityProvider() (*IdentityProvider, error) {
	if s.Identity == nil {
		return nil, fault.New(fault.Conflict, codeNoIdentityProvider, "This hub has no identity provider; log in with a "+
			"password.", nil).Permanent()
	}
	return s.Identity, nil
}

// StartBrowserLogin begins a login by authorization code.
func (s *Service) StartBrowserLogin(ctx context.Context, m Meta) (BrowserLogin, error) {
	p, err := s.identityProvider()
	if err != nil {
		return BrowserLogin{}, err
	}
	state, secret := iam.NewHandle(), browserLogin{Nonce: iam.NewHandle(), Verifier: iam.NewHandle()}
	url, err := p.AuthURL(ctx, state, secret.Nonce, secret.Verifier)
	if err != nil {
		return BrowserLogin{}, err
	}
	out := BrowserLogin{State: state, URL: url, ExpiresAt: m.Now.Add(browserLoginLife)}
	return out, s.keepLogin(ctx, m, state, secret, out.ExpiresAt)
}

// FinishBrowserLogin starts a session for whom the provider has sent back with a code.
func (s *Service) FinishBrowserLogin(ctx context.Context, m Meta, state, code,
	userAgent string,
) (iam.SessionTokens, error) {
	p, err := s.identityProvider()
	if err != nil {
		return iam.SessionTokens{}, err
	}
	var secret browserLogin
	if err := s.openLogin(ctx, m, state, &secret); err != nil {
		return iam.SessionTokens{}, err
	}
	who, err := p.Exchange(ctx, code, secret.Nonce, secret.Verifier)
	if err != nil {
		return iam.SessionTokens{}, err
	}
	return s.externalSession(ctx, m, p, state, who, userAgent)
}

// StartDeviceLogin begins a login that the person confirms on another device.
func (s *Service) StartDeviceLogin(ctx context.Context, m Meta) (DeviceLogin, error) {
	p, err := s.identityProvider()
	if err != nil {
		return DeviceLogin{}, err
	}
	device, err := p.Device(ctx)
	if err != nil {
		return DeviceLogin{}, err
	}
	out := DeviceLogin{Handle: iam.NewHandle(), Device: device, ExpiresAt: m.Now.Add(device.Life)}
	return out, s.keepLogin(ctx, m, out.Handle, deviceLogin{DeviceCode: device.Code}, out.ExpiresAt)
}

// FinishDeviceLogin starts a session once the person has confirmed the login; pending says that it has not yet.
func (s *Service) FinishDeviceLogin(ctx context.Context, m Meta, handle,
	userAgent string,
) (_ iam.SessionTokens, pending bool, _ error) {
	p, err := s.identityProvider()
	if err != nil {
		return iam.SessionTokens{}, false, err
	}
	var secret deviceLogin
	if err := s.openLogin(ctx, m, handle, &secret); err != nil {
		return iam.SessionTokens{}, false, err
	}
	who, pending, err := p.Poll(ctx, secret.DeviceCode)
	if err != nil || pending {
		return iam.SessionTokens{}, pending, err
	}
	tokens, err := s.externalSession(ctx, m, p, handle, who, userAgent)
	return tokens, false, err
}

// keepLogin seals what a login needs to be finished.
func (s *Service) keepLogin(ctx context.Context, m Meta, handle string, secret any, expires time.Time) error {
	text, err := json.Marshal(secret)
	if err != nil {
		return err
	}
	return do(ctx, s, access.Anyone, func(tx db.Tx, _ access.Nothing) error {
		return iam.StartExternalLogin(ctx, tx, s.Sealer, iam.ExternalLogin{
			Handle: handle, Secret: text, ExpiresAt: expires,
		}, m.Now)
	})
}

func (s *Service) openLogin(ctx context.Context, m Meta, handle string, into any) error {
	text, err := db.Query(ctx, s.DB, func(tx db.Tx) ([]byte, error) {
		return iam.ExternalLoginSecret(ctx, tx, s.Sealer, handle, m.Now)
	})
	if err != nil {
		return err
	}
	return json.Unmarshal(text, into)
}

// externalSession ends the login under way and starts a session for the user of the identity.
func (s *Service) externalSession(ctx context.Context, m Meta, p *IdentityProvider, handle string, who oidc.Identity,
	userAgent string,
) (iam.SessionTokens, error) {
	id := iam.Identity{Issuer: who.Issuer, Subject: who.Subject, DisplayName: who.Name}
	if who.EmailVerified {
		id.Email = who.Email
		_, domain, _ := strings.Cut(iam.FoldEmail(who.Email), "@")
		id.OrgSlug = p.OrgsOfDomains[domain]
	}
	userID, fresh := db.NewID(), iam.NewSessionTokens(userAgent, m.SourceAddress, m.Now)
	return run(ctx, s, access.Anyone, func(tx db.Tx, _ access.Nothing) (iam.SessionTokens, error) {
		if err := iam.EndExternalLogin(ctx, tx, handle); err != nil {
			return iam.SessionTokens{}, err
		}
		user, made, err := iam.UserOfIdentity(ctx, tx, id, userID, m.Now)
		if err != nil {
			return iam.SessionTokens{}, err
		}
		if made {
			by := m
			by.Principal = iam.Principal{Type: principal.User, ID: user.ID}
			if err := by.recordUser(ctx, tx, "iam.user.created", actionExternal, user, nil, userState(user)); err != nil {
				return iam.SessionTokens{}, err
			}
		}
		return m.startSession(ctx, tx, fresh, user)
	})
}
